"""Checks the files of TLS before a model is loaded. A mistake names its flag and its file."""

import ssl
from argparse import Namespace


def check(args: Namespace) -> None:
    """Raise ValueError unless --ssl-certfile and --ssl-keyfile are both absent, or a certificate
    and its key."""
    certificate, key = args.ssl_certfile, args.ssl_keyfile
    if not certificate and not key:
        return
    if not certificate or not key:
        raise ValueError("--ssl-certfile and --ssl-keyfile: expected both or none")
    for flag, path in (("--ssl-certfile", certificate), ("--ssl-keyfile", key)):
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            raise ValueError(f"{flag} {path}: {error.strerror}: expected a PEM file") from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(certificate)
    except ssl.SSLError as error:
        raise ValueError(f"--ssl-certfile {certificate}: expected a certificate (PEM)") from error
    try:
        context.load_cert_chain(certificate, key, password=lambda: "")  # asks nobody for one
    except ssl.SSLError as error:
        expected = "a private key (PEM) without a passphrase"
        if error.reason == "KEY_VALUES_MISMATCH":
            expected = f"the private key of --ssl-certfile {certificate}"
        raise ValueError(f"--ssl-keyfile {key}: expected {expected}") from error
