# SPDX-License-Identifier: GPL-2.0-or-later
"""Keys for migration over TLS."""
import subprocess
import tempfile
from pathlib import Path

from tests.lab.host import Place
from tests.lab.initramfs import tool

# An object of QEMU: the directory of certificates(), "server" or "client"
X509 = "tls-creds-x509,id=tls,dir={},endpoint={},verify-peer=on"


def dh_parameters() -> str:
    """RFC 7919's group. QEMU would search for a prime, for a minute in L1."""
    return tool("openssl", "genpkey", "-genparam", "-algorithm", "DH", "-pkeyopt", "group:ffdhe2048")


def directory(lab: Place) -> str:
    """A directory in the lab with the keys for Pair's tls."""
    path = f"{lab.tmp}/psk"
    lab.run(f"mkdir -p {path} && echo qemu:6a1d3a2b >{path}/keys.psk && "
            f"echo '{dh_parameters()}' >{path}/dh-params.pem", check=True)
    return path


def certificates(lab: Place, address: str) -> str:
    """A directory in the lab with X.509 certificates, by QEMU's names: of an authority, of a server at an
    address, of a client."""
    path = f"{lab.tmp}/pki"
    lab.run(f"mkdir -p {path}", check=True)

    def openssl(*words: str | Path) -> None:
        subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *words],
                       check=True, capture_output=True, cwd=here)

    with tempfile.TemporaryDirectory() as here:
        openssl("-subj", "/CN=authority", "-keyout", "ca-key.pem", "-out", "ca-cert.pem",
                "-addext", "keyUsage=critical,keyCertSign")
        for name in "server", "client":
            openssl("-subj", f"/CN={name}", "-keyout", f"{name}-key.pem", "-out", f"{name}-cert.pem",
                    "-CA", "ca-cert.pem", "-CAkey", "ca-key.pem", "-addext", f"subjectAltName=IP:{address}",
                    "-addext", "basicConstraints=critical,CA:FALSE",
                    "-addext", "keyUsage=critical,digitalSignature,keyEncipherment",
                    "-addext", f"extendedKeyUsage={name}Auth")
        Path(here, "dh-params.pem").write_text(dh_parameters())
        for file in Path(here).iterdir():
            lab.run(f"echo '{file.read_text()}' >{path}/{file.name}", check=True)
    return path
