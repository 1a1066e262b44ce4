"""Mistakes of the user, told in one line.

The command line prints the message alone on standard error and exits with status 2; a program that calls the library
gets an ordinary `ValueError`. A message says what is wrong, where (file, series, stamp, count), and what to do.
"""


class UserError(ValueError):
    """Wrong input, wrong option or a missing file: something that the user can put right."""
