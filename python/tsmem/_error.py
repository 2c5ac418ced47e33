class Error(RuntimeError):
    """What tsmem raises: one sentence that says what is wrong.

    `kind` is "request" (what was asked for can't be done with this model), "input" (a model, file or argument that can't be read or run, or a
    library that is missing), "budget" (no plan needs as little memory), "different" (a verification failed) or "bug" (of tsmem).
    """

    def __init__(self, sentence: str, kind: str = "input"):
        super().__init__(sentence)
        self.kind = kind
