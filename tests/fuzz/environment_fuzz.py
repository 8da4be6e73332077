"""The texts of environment variables, which users, clusters and launchers set."""

from fuzzing import instrumented, run

with instrumented():
    from mscomm import environment
    from mscomm.bootstrap import kvs, pmi, pmix
    from mscomm.errors import BackendUnavailable


def fuzz(data: bytes) -> None:
    """data: the number of the variable, and its text, as the kernel passes it to a process."""
    if not data:
        return
    row = environment.VARIABLES[data[0] % len(environment.VARIABLES)]
    text = data[1:].replace(b"\0", b"").decode("utf-8", "surrogateescape")
    env = {row.name: text}
    try:
        row.read(env)
    except ValueError as error:
        assert str(error).startswith(f"{row.name}=")
    for names in (pmi._NAMES, pmix._NAMES):
        texts = text.split(" ")
        env = {name: texts[i % len(texts)] for i, group in enumerate(names) for name in group}
        try:
            seat = kvs.place(env, names, "launcher")
            assert 0 <= seat.rank < seat.size
        except BackendUnavailable:
            continue


def seeds():
    for number, row in enumerate(environment.VARIABLES):
        for text in ("1", str(row.default), "inf", "20000-20100", "MS_WORKER", "9" * 5000)[
            : 6 if row.parse is not str else 2
        ]:
            yield bytes([number]) + text.encode()
    yield b"\0" + b"0 4 0 4"


if __name__ == "__main__":
    run(fuzz, seeds())
