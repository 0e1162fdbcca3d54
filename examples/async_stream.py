"""Many asyncio tasks with one model: two streams, an answer as a whole, and one that is given up.

python examples/async_stream.py [MODEL_DIR]
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path

from predict import AsyncLLM, EngineConfig, SamplingParams

PARAMS = SamplingParams(temperature=0.0, max_new_tokens=32)


async def stream(llm: AsyncLLM, prompt: str) -> str:
    """The answer to a prompt, put together from its pieces."""
    return "".join([piece.text async for piece in llm.stream(prompt, PARAMS)])


async def run(directory: str) -> None:
    """Runs the example."""
    config = EngineConfig(
        model_name_or_path=directory,
        attention="append",
        batch_size=4,
        max_length=256,
    )
    async with await AsyncLLM.load(config) as llm:
        given_up = asyncio.create_task(llm.generate("import sys\n", PARAMS))
        whole = asyncio.create_task(llm.generate("import os\n", PARAMS))
        streams = [stream(llm, "def binary_search(items, target):"), stream(llm, "class Stack:")]
        given_up.cancel()  # its blocks are free again at the next step
        for text in await asyncio.gather(*streams):
            print(f"--- streamed\n{text}")
        with contextlib.suppress(asyncio.CancelledError):
            await given_up
        print(f"--- whole\n{(await whole).text}")
        print(f"--- {(await llm.stats()).num_used_blocks} cache blocks in use")


def main() -> None:
    """Runs the example."""
    directory = sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).parent / "demo_model")
    asyncio.run(run(directory))


if __name__ == "__main__":
    main()
