"""The one error that is shown as a line instead of a traceback."""


class UserError(ValueError):
    """a user's mistake: what, where, what to do; shown as one line"""
