"""One server on Ray Serve: fronts that speak HTTP, and the engines of one model behind them."""
