"""Many replicas of one model on Ray: what predict/batch_ray.py and predict/serve_ray.py share."""
