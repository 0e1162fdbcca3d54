"""Load on an OpenAI-compatible server: `python -m predict.bench.serving --help`.

`arrivals` says when requests are sent, `workload` what they ask, `client` sends one and takes its
times, `report` sums them up, `sweep` looks for the highest load that holds limits, `plot` draws.
"""
