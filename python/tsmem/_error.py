class Error(RuntimeError):
    """What tsmem raises: one sentence that says what is wrong.

    `kind` is "request" (what was asked for can't be done with this model), "input" (a model, file or argument that can't be read or run, or a
    library that is missing), "budget" (no plan needs as little memory), "different" (a verification failed) or "bug" (of tsmem).
    `about` names what it is about, where a caller may go on without that: "modules" (nothing has that path), "budget" (no plan saves anything).
    """

    def __init__(self, sentence: str, kind: str = "input", about: str = ""):
        super().__init__(sentence)
        self.kind = kind
        self.about = about
