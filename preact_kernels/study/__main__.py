"""`python -m preact_kernels.study train|placements|shortcuts|depth|signal`."""

import sys

try:
    from preact_kernels.study.commands import main
except ModuleNotFoundError as error:
    package = (error.name or "preact_kernels").partition(".")[0]
    if package == "preact_kernels":
        raise
    raise SystemExit(
        f"study: expected {package}, which is not installed: pip install 'preact-kernels[study]'"
    ) from error

if __name__ == "__main__":
    sys.exit(main())
