class Error(RuntimeError):
    """What tsmem raises: one sentence that says what is wrong. `exit_code` is the command line tool's, where it was called."""

    def __init__(self, sentence: str, exit_code: int = 3):
        super().__init__(sentence)
        self.exit_code = exit_code
