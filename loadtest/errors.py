"""What a load test refuses.

LoadTestError
├── SettingError    a flag, or a file that a flag names
└── ServerError     the server cannot be tested: not there, or its warm-up failed
"""


class LoadTestError(Exception):
    """Ends the command with one line that says why."""


class SettingError(LoadTestError):
    """Names the flag."""


class ServerError(LoadTestError):
    """Names the URL."""
