"""Jobs of several processes."""

import socket

import warm


def on_ranks(ranks, *command, codes=None, each=None):
    """The results of a job of `ranks` processes, as `torchrun` starts them. `codes`: what they exit with if not 0.
    `each`: the commands, if they differ."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        where = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1])}
        where |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    commands = each or [command] * ranks
    done = warm.beside(*((c, {**where, "RANK": str(n), "LOCAL_RANK": str(n)}) for n, c in enumerate(commands)))
    assert [each.returncode for each in done] == (codes or [0] * ranks), "".join(each.stderr[-3000:] for each in done)
    return done
