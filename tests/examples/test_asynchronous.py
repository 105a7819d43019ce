"""The example of asyncio: texts as they are alone, and a coroutine that leaves cancels its request."""

import asyncio

import pytest

from examples import asynchronous as example
from specker import cpu
from specker.options import Params


@pytest.mark.skipif(cpu.problem() is not None, reason="without compiled kernels bits depend on the company")
def test_texts_are_those_of_each_prompt_alone(bundled):
    prompts = ["def fibonacci(n):", "class Stack:"]
    assert asyncio.run(example.main(prompts, 9)) == [bundled.generate(prompt, 9).text for prompt in prompts]


def test_a_coroutine_that_leaves_cancels_its_request(bundled):
    async def leave():
        texts = example.stream(bundled.session, "import ", Params(max_new_tokens=400))
        first = await anext(texts)
        await texts.aclose()
        return first

    with example.stepping(bundled.session):
        first = asyncio.run(leave())
    assert bundled.generate("import ", 400).text.startswith(first) and not bundled.session.busy
