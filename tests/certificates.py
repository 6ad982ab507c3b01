"""Certificates for servers of tests and measurements, by openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path

LEAF = "basicConstraints=critical,CA:FALSE"
"""An extension without which rustls believes no certificate that signed itself."""


def certificate(folder: Path, *extensions: str) -> tuple[str, str]:
    """The files of a certificate for 127.0.0.1 that signed itself, and of its key. extensions: of
    openssl's. Raises ``FileNotFoundError`` where there is no openssl."""
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-keyout", key, "-out", cert, "-subj", "/CN=store"]
    for extension in ("subjectAltName=IP:127.0.0.1", *extensions):
        command += ["-addext", extension]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return cert, key
