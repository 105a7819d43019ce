"""Stream several requests from asyncio: one thread runs the engine's steps, and coroutines await the events.

python examples/asynchronous.py
"""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import contextmanager

import specker
from specker.options import Params
from specker.runtime.session import Session


@contextmanager
def stepping(session: Session):
    """A thread runs the session's steps within the block."""
    ended = threading.Event()

    def run():
        while not ended.is_set():
            if session.wait(0.05):
                try:
                    session.step()
                except Exception as error:  # its requests have got it, too
                    print(f"a step failed: {error}")

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


async def stream(session: Session, prompt: str, params: Params) -> AsyncIterator[str]:
    """The text of one request as it comes. Leaving the iteration early cancels the request."""
    loop, inbox = asyncio.get_running_loop(), asyncio.Queue()
    request = session.submit(
        session.request(prompt, params), deliver=lambda entry: loop.call_soon_threadsafe(inbox.put_nowait, entry)
    )
    try:
        while True:
            entry = await inbox.get()
            if isinstance(entry, BaseException):
                raise entry
            yield entry.text
            if entry.finished:
                return
    finally:
        await asyncio.to_thread(session.cancel, request)  # it may wait for a round


async def main(prompts: list[str], tokens: int = 32) -> list[str]:
    with specker.load(batch_size=len(prompts), device="cpu") as engine, stepping(engine.session):

        async def answer(prompt: str) -> str:
            return "".join([text async for text in stream(engine.session, prompt, Params(max_new_tokens=tokens))])

        return await asyncio.gather(*map(answer, prompts))


if __name__ == "__main__":
    for text in asyncio.run(main(["def fibonacci(n):", "class Stack:", "import "])):
        print(text, end="\n\n")
