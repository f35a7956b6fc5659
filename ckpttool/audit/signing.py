"""model.sig: an OpenSSF model-signing bundle over the files of an archive, made and verified without unpacking it.

A bundle is a DSSE envelope around an in-toto statement that lists (file, SHA-256), with the signature and either a hint
at the key or the certificates. It equals what `model_signing sign` makes of the unpacked folder, so anybody can check
that folder without ckpttool (model.sig itself is not signed):

    tar --zstd -xf ARCHIVE.tar.zst -C DIR
    python -m model_signing verify key DIR --signature DIR/model.sig --public_key pub.pem
    python -m model_signing verify certificate DIR --signature DIR/model.sig --certificate_chain root.pem

Keys are on the curves P-256, P-384 or P-521. A key is identified by the SHA-256 of its public PEM file, as `sha256sum
pub.pem` prints it. A certificate is validated for the time when its validity began, so that a signature outlives it.

Sigstore's keyless signatures need a network and a browser, and ckpttool does not make them. Sign the unpacked folder
instead: `python -m model_signing sign sigstore DIR --signature ARCHIVE.tar.zst.sig`, and `verify sigstore` likewise.

ECDSA uses a random number for each signature, so the same files signed twice have different bundles.

Sources: model_signing 1.1 (`_signing/signing.py` for the statement, `_cli.py` for what is left out by default);
https://github.com/secure-systems-lab/dsse; https://docs.sigstore.dev/about/bundle/
"""

from __future__ import annotations

import base64
import hashlib
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .. import bounded_json
from ..errors import Corrupt, Differs, Unsupported, UsageError, argument, kind_of_failure
from ..extras import explain_missing_package
from ..printable import list_first, printable

__all__ = ["describe_signer", "sign_files", "verify_signature"]

SIGNATURE = "model.sig"
_MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
_CURVES = ("secp256r1", "secp384r1", "secp521r1")


def sign_files(
    resources: Sequence[tuple[str, str]],
    name: str,
    *,
    key: str,
    password: str | None = None,
    certificate: str | None = None,
    chain: Sequence[str] = (),
) -> bytes:
    """Sign files, and return the signature bundle, the content of model.sig.

    Args:
        resources: (path, SHA-256 in hex) of each file.
        name: the name of the signed model; it is not checked.
        key: PEM file of the private key.
        password: password of that file; None if it has none.
        certificate: PEM file of the certificate of that key; if None, the bundle only names the key by its hash.
        chain: PEM files of the certificates between that one and the root.

    Raises:
        UsageError: a key or certificate is invalid or unreadable, or the password is wrong.
        MissingPackage: model-signing is not installed.
    """
    with _import_model_signing() as lib, tempfile.TemporaryDirectory() as folder:
        private = _load_private_key(key, password)
        if certificate is not None:
            found = _load_certificates(certificate)[0]
            if found.public_key() != private.public_key():
                raise UsageError(f"{certificate} is not the certificate of {key}.", code="CKPT0218")
            for file in chain:
                _load_certificates(file)
        config = lib.signing.Config().set_hashing_config(_make_hashing_config(lib, name, resources))
        with _provide_key_as_file(private) as path:
            if certificate is None:
                config.use_elliptic_key_signer(private_key=path)
            else:
                # at least one: the library cannot read none, and the certificate itself in its chain does no harm
                config.use_certificate_signer(
                    private_key=path, signing_certificate=certificate, certificate_chain=chain or [certificate]
                )
        out = os.path.join(folder, SIGNATURE)
        config.sign(name, out)
        with open(out, "rb") as f:
            return f.read()


def verify_signature(
    bundle: bytes,
    resources: Sequence[tuple[str, str]],
    *,
    public_key: str | None = None,
    certificates: Sequence[str] = (),
) -> str:
    """Verify a signature over files; returns a line that names the signer.

    Args:
        bundle: the content of model.sig.
        resources: (path, SHA-256 in hex) of each file.
        public_key: file of the public key, PEM, for a bundle that was signed with a key; None for others.
        certificates: files of the root certificates that are trusted, PEM, for one that was signed with a certificate.

    Raises:
        Differs: the signature is invalid, or files were changed, added or removed.
        Corrupt: the bundle is damaged. Unsupported: model-signing before 1.0 made it, or it signs other hashes.
        UsageError: the key or certificate for the check is missing or unreadable. MissingPackage: model-signing is not
            installed.
    """
    material = _read_verification_material(bundle)
    with _import_model_signing() as lib, tempfile.TemporaryDirectory() as folder:
        config = lib.verifying.Config()
        if "publicKey" in material:
            _configure_public_key(config, material["publicKey"]["hint"], public_key, certificates)
        else:
            _configure_certificates(config, certificates)
        known = _make_hashing_config(lib, "", resources)
        config.set_hashing_config(known)
        path = os.path.join(folder, SIGNATURE)
        with open(path, "wb") as f:
            f.write(bundle)
        try:
            config.verify(folder, path)
        except Exception as e:  # of the library's many parts; it has no class of its own
            if known.manifest.signed is not None:
                raise _make_difference_error(known.manifest.signed, resources) from None
            if type(e).__name__ == "ValidationError":
                raise Corrupt(
                    f"{SIGNATURE} is not a signature bundle, or damaged ({_shorten_reason(e)}).", code="CKPT0425"
                ) from None
            raise Differs(
                f"{SIGNATURE}: the signature is invalid: {_shorten_reason(e)}. It names {_describe_signer(material)}, "
                "which is not proven.",
                code="CKPT0502",
            ) from None
    return _describe_signer(material)


def describe_signer(bundle: bytes) -> str:
    """Return a line that names the key or certificate in a bundle. Nothing is verified, and model-signing is not
    needed.

    Raises:
        Corrupt: the bundle is damaged. Unsupported: model-signing before 1.0 made it.
    """
    return _describe_signer(_read_verification_material(bundle))


# --------------------------------------------------------------------------------------------------------- bundles


def _read_verification_material(bundle: bytes) -> dict[str, Any]:
    """Parse a bundle, and return what it says of its signer.

    Returns:
        {"publicKey": {"hint": SHA-256 of the public key}} or {"x509CertificateChain": {"certificates": [...]}}.

    Raises:
        Corrupt, Unsafe: the bundle is damaged.
        Unsupported: model-signing before 1.0 made it.
    """
    tree = bounded_json.parse(bundle, SIGNATURE)
    try:
        if tree["mediaType"] != _MEDIA_TYPE:
            raise ValueError(f"its media type is {str(tree['mediaType'])[:80]!a}")
        envelope, material = tree["dsseEnvelope"], tree["verificationMaterial"]
        for text in (envelope["payload"], envelope["signatures"][0]["sig"]):
            base64.b64decode(text, validate=True)
        if "publicKey" in material:
            hint = material["publicKey"].get("hint")
            if not hint:
                raise Unsupported(
                    f"{SIGNATURE} does not name the key; it was made by model-signing before 1.0. Check it "
                    "with that version, or sign again.",
                    code="CKPT0329",
                )
            bytes.fromhex(hint)
        else:
            for row in material["x509CertificateChain"]["certificates"] or [{}]:
                base64.b64decode(row["rawBytes"], validate=True)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as e:
        raise Corrupt(
            f"{SIGNATURE} is not a signature bundle, or damaged ({type(e).__name__}: {e}).", code="CKPT0425"
        ) from None
    found: dict[str, Any] = material
    return found


def _describe_signer(material: dict[str, Any]) -> str:
    """Return a line that names the signing key or certificate.

    Args:
        material: what the bundle says of its signer, of `_read_verification_material`.

    Raises:
        Corrupt: the certificate cannot be read.
    """
    if "publicKey" in material:
        return f"EC key SHA256:{material['publicKey']['hint']}"
    der = base64.b64decode(material["x509CertificateChain"]["certificates"][0]["rawBytes"])
    fingerprint = f"certificate SHA256:{hashlib.sha256(der).hexdigest()}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what a later cryptography will refuse in old certificates
            from cryptography import x509

            cert = x509.load_der_x509_certificate(der)
            text = (
                f"certificate {cert.subject.rfc4514_string()}, by {cert.issuer.rfc4514_string()}, valid "
                f"{cert.not_valid_before_utc:%Y-%m-%d} to {cert.not_valid_after_utc:%Y-%m-%d}, {fingerprint[12:]}"
            )
    except ImportError:
        return fingerprint
    except ValueError as e:
        raise Corrupt(f"{SIGNATURE} holds a certificate that cannot be read ({e}).", code="CKPT0425") from None
    return printable(text)


def _make_difference_error(signed: Any, resources: Sequence[tuple[str, str]]) -> Differs | Unsupported:
    """Return the error that says which files differ from those that were signed; the signature itself is valid.

    Args:
        signed: the manifest in the bundle, an object of model_signing.
        resources: (path, SHA-256 in hex) of each file that is there.
    """
    method = signed.serialization_type
    if (method.get("method"), method.get("hash_type")) != ("files", "sha256"):
        return Unsupported(
            f"{SIGNATURE} signs the {method.get('hash_type')!a} of {method.get('method')!a}; an archive lists the "
            "SHA-256 of its files. Unpack it and check it with model_signing.",
            code="CKPT0329",
        )
    then, now = {r.identifier: r.digest.digest_hex for r in signed.resource_descriptors()}, dict(resources)
    faults = {
        "changed": [n for n in now if n in then and now[n] != then[n]],
        "not signed": [n for n in now if n not in then],
        "missing": [n for n in then if n not in now],
    }
    first = {what: list_first((printable(n)[:200] for n in sorted(names)), 5) for what, names in faults.items()}
    summary = "; ".join(f"{what}: {names}" for what, names in first.items() if names)
    return Differs(
        f"{SIGNATURE}: the signature is good, but the files are others than those signed ({summary}). They were "
        "altered afterwards, or the signature is that of another archive.",
        code="CKPT0502",
    )


def _shorten_reason(e: Exception) -> str:
    """Return the text of an error of model_signing as one line of at most 200 characters.

    If the error has no text, as for a wrong signature, "it does not match the signed content" is returned.
    """
    return printable(" ".join(str(e).split()).rstrip(".")[:200]) or "it does not match the signed content"


# ------------------------------------------------------------------------------------------------------------- keys


def _configure_public_key(config: Any, hint: str, public_key: str | None, certificates: Sequence[str]) -> None:
    """Configure model_signing to verify with a public key.

    Args:
        config: the configuration of model_signing, which is changed.
        hint: SHA-256 of the public key, from the bundle.
        public_key: PEM file of the key; None if none was given.
        certificates: root certificates that were given; they only affect the error message.

    Raises:
        Differs: the bundle was made with another key.
        UsageError: no key was given, or it cannot be read or used.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization

    if public_key is None:
        given = "with a key, not with a certificate" if certificates else "with a key"
        raise UsageError(
            f"the archive was signed {given} (EC key SHA256:{hint}); give {argument('public_key')}.", code="CKPT0218"
        )
    pem = _read_key_file(public_key)
    try:
        found = serialization.load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm):
        raise UsageError(f"{public_key} is not a public key in PEM form.", code="CKPT0218") from None
    _refuse_curve(found, public_key)
    pem = found.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    if hashlib.sha256(pem).hexdigest() != hint:
        raise Differs(
            f"{SIGNATURE} was made with a different key: EC key SHA256:{hint}, not {public_key} "
            f"(SHA256:{hashlib.sha256(pem).hexdigest()}).",
            code="CKPT0502",
        )
    config.use_elliptic_key_verifier(public_key=public_key)


def _configure_certificates(config: Any, certificates: Sequence[str]) -> None:
    """Configure model_signing to verify with root certificates.

    Args:
        config: the configuration of model_signing, which is changed.
        certificates: PEM files of the certificates.

    Raises:
        UsageError: no certificate was given, or one cannot be read.
    """
    if not certificates:  # the library would trust whoever has a web site
        raise UsageError(
            f"the archive was signed with a certificate; give {argument('certificates')}, the root that you trust.",
            code="CKPT0218",
        )
    for file in certificates:
        _load_certificates(file)
    config.use_certificate_verifier(certificate_chain=certificates)


def _load_private_key(file: str, password: str | None) -> Any:
    """Return the private key in a PEM file, as an object of cryptography; `password` is None if it has none.

    Raises:
        UsageError: it cannot be read, the password is wrong, or it is on another curve than P-256, P-384 or P-521.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization

    data = _read_key_file(file)
    try:
        found = serialization.load_pem_private_key(data, None if password is None else password.encode())
    except TypeError:
        raise UsageError(
            f"{file} is encrypted; give its password." if password is None else f"{file} has no password; give none.",
            code="CKPT0218",
        ) from None
    except (ValueError, UnsupportedAlgorithm):
        more = "" if password is None else ", or the password is another"
        raise UsageError(f"{file} is not a private key in PEM form{more}.", code="CKPT0218") from None
    _refuse_curve(found, file)
    return found


def _refuse_curve(key: object, file: str) -> None:
    """Raise UsageError unless a key, from `file`, is on a curve that model-signing knows: P-256, P-384 or P-521."""
    curve = getattr(getattr(key, "curve", None), "name", None)
    if curve not in _CURVES:
        raise UsageError(
            f"{file} is not an elliptic-curve key on P-256, P-384 or P-521; model-signing knows only those.",
            code="CKPT0218",
        )


def _load_certificates(file: str) -> Any:
    """Return the certificates in a PEM file, as objects of cryptography.

    Raises:
        UsageError: the file cannot be read, or holds none.
    """
    from cryptography import x509

    pem = _read_key_file(file)
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError:
        raise UsageError(f"{file} holds no certificates in PEM form.", code="CKPT0218") from None


def _read_key_file(file: str) -> bytes:
    """Return the bytes of a key or certificate file, at most 1 MiB.

    Raises:
        UsageError, CkpttoolError: it cannot be read.
    """
    try:
        with open(file, "rb") as f:
            return f.read(1 << 20)
    except OSError as e:
        raise kind_of_failure(e, UsageError)(f"{file} cannot be read: {e.strerror}.") from None


@contextmanager
def _provide_key_as_file(private: Any) -> Iterator[str]:
    """Provide a private key as a file while the block runs, and yield its path, which can be read once.

    It is a pipe, so a decrypted key is never on a disk. model_signing takes keys only by path, expects passwords of the
    wrong type, and none together with a certificate.

    Args:
        private: the key, an object of cryptography.
    """
    from cryptography.hazmat.primitives import serialization

    pem = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    out, into = os.pipe()
    try:
        try:
            os.write(into, pem)  # some hundred bytes, less than any pipe holds
        finally:
            os.close(into)
        yield f"/dev/fd/{out}"
    finally:
        os.close(out)


# ------------------------------------------------------------------------------------------------------ the library


@contextmanager
def _import_model_signing() -> Iterator[Any]:
    """Yield the module model_signing, with its warnings and logs silenced while the block runs.

    Raises:
        MissingPackage: it is not installed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import model_signing
        except ImportError as e:
            raise explain_missing_package("signing", "model_signing", why=str(e)) from None
        import logging

        log = logging.getLogger("model_signing")
        if not log.handlers:
            log.addHandler(logging.NullHandler())
        yield model_signing


def _make_hashing_config(lib: Any, name: str, resources: Sequence[tuple[str, str]]) -> Any:
    """Return a hashing configuration for model_signing that returns known hashes instead of hashing a folder.

    After a verification, its `manifest.signed` is the manifest in the bundle, or None if the signature itself is
    invalid.

    Args:
        lib: the module model_signing.
        name: the name of the signed model.
        resources: (path, SHA-256 in hex) of each file.
    """
    from model_signing._hashing.hashing import Digest

    class Listed(lib.manifest.Manifest):  # type: ignore[misc]
        signed: object = None

        def __eq__(self, other: object) -> bool:
            self.signed = other
            return bool(super().__eq__(other))

    class Known(lib.hashing.Config):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            kind = lib.manifest.SerializationType.from_args(
                {"method": "files", "hash_type": "sha256", "allow_symlinks": False, "ignore_paths": [SIGNATURE]}
            )
            items = [kind.new_item(path, Digest("sha256", bytes.fromhex(digest))) for path, digest in resources]
            self.manifest = Listed(name, items, kind)

        def hash(self, model_path: object, *, files_to_hash: object = None) -> Any:
            return self.manifest

    return Known()
