"""Load on an OpenAI-compatible server: `python -m predict.bench.serving --help`.

`loads` says when requests are sent and looks for the highest load that holds limits, `workload`
what they ask, `client` sends one and takes its times, `report` sums them up.
"""
