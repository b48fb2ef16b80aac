"""`inferbus.workers.engine.interface` on an embedded SGLang.

    engine = await SGLangEngine.launch(["--model-path", "Qwen/Qwen3-8B", "--tp", "2"], role="decode")
    prompt = await engine.prepare(request)
    leg = prompt.leg(0, rid=secrets.token_hex(16))
    async with contextlib.aclosing(engine.generate(leg)) as deltas:
        async for chunk in prompt.answer().chunks(deltas):
            ...
    await engine.close()

`launch` takes SGLang's own flags, has to be called in the main thread of a
program whose entry point is guarded (`if __name__ == "__main__"`: SGLang spawns
processes), and blocks while the model loads. Install SIGTERM and SIGINT
handlers after it; nothing replaces them later.

Nothing here imports SGLang or torch before `launch` is called.
"""

from __future__ import annotations

from inferbus.workers.engine.sglang.engine import SGLangEngine
from inferbus.workers.engine.sglang.startup import LaunchFailed

__all__ = ["LaunchFailed", "SGLangEngine"]
