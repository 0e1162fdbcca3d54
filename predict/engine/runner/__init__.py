"""What runs a step: networks, choosers, and the runners that wire them for a CPU and for a GPU."""
