"""``python -m tests.s3``: an S3 server until Ctrl-C, with a bucket, and what to export to use it.

Where it cannot run, it says why and ends with 0, but with 1 if ``PORTUS_S3`` is ``required``.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

from tests.s3 import needs
from tests.s3.needs import ServerError
from tests.s3.server import Server

BUCKET = "portus"


def main() -> int:
    """Parse, install, serve."""
    parser = argparse.ArgumentParser(prog="python -m tests.s3", description=__doc__)
    parser.add_argument("--setup", action="store_true", help="only install")
    given = parser.parse_args()
    try:
        if given.setup:
            needs.install()
        needs.check()
    except ServerError as error:
        print(f"s3: skipped: {error}", file=sys.stderr)
        wish = os.environ.get("PORTUS_S3", "required" if given.setup else "")
        return 1 if wish == "required" else 0
    if given.setup:
        print("s3: ready; make s3, make test-s3")
        return 0
    with tempfile.TemporaryDirectory(prefix="portus-s3-") as own, Server(Path(own)) as server:
        server.make_bucket(BUCKET)
        print(f"# there is a bucket: s3://{BUCKET}")
        for name, value in server.environment().items():
            print(f"export {name}={value}", flush=True)
        ending = {signal.SIGINT, signal.SIGTERM}
        signal.pthread_sigmask(signal.SIG_BLOCK, ending)  # now: children inherit it
        signal.sigwait(ending)
    return 0


if __name__ == "__main__":
    sys.exit(main())
