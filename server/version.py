"""The version of this distribution."""

from importlib.metadata import PackageNotFoundError, version


def package_version() -> str:
    try:
        return version("pdserve")
    except PackageNotFoundError:
        return "unknown"
