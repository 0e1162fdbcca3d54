"""llama.cpp beside Regatta on a CPU, in turns: `python -m predict.bench.cpu_peer --help`.

`kinds` says which types stand beside which, `shapes` which networks, `gguf_file` writes the peer's
file, `ours` and `llama_cpp_side` are the two processes that are timed, `sides` starts them and asks
them, `turns` makes them take turns and sums up, `others` says whether the machine was idle.
"""
