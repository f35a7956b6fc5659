"""Signatures: ours are good to model-signing's own command line over the unpacked folder, and its own are good to us."""

from __future__ import annotations

import base64
import builtins
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from ckpttool.audit import signing
from ckpttool.errors import Corrupt, Differs, Unsafe, Unsupported, UsageError

pytest.importorskip("model_signing")
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

FILES = {
    "README.txt": b"read me\n",
    "tensors-00001.safetensors": bytes(range(256)) * 40,
    "values.json": b"{}\n",
    "MANIFEST.json": b'{"schema": 1}\n',
    "SHA256SUMS": b"",
}
PEM, PKCS8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8


def listed(files: dict[str, bytes]) -> list[tuple[str, str]]:
    return [(n, hashlib.sha256(data).hexdigest()) for n, data in files.items()]


def name(text: str) -> x509.Name:
    return x509.Name(
        [x509.NameAttribute(NameOID.COMMON_NAME, text), x509.NameAttribute(NameOID.ORGANIZATION_NAME, "Pr\u00fcfer")]
    )


class Keys:
    """Key files, and certificates of a root, of one below it, and of two signers below that."""

    impostor: str
    stranger: str

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.key, self.public = self.pair("signer", ec.generate_private_key(ec.SECP256R1()))
        self.other, self.other_public = self.pair("other", ec.generate_private_key(ec.SECP256R1()))
        start = datetime(2020, 1, 1, tzinfo=UTC)
        root = ec.generate_private_key(ec.SECP384R1())
        middle = ec.generate_private_key(ec.SECP256R1())
        self.root_name, self.middle_name = name("Root"), name("Middle")
        self.root = self.certificate(
            "root", self.root_name, root.public_key(), self.root_name, root, start, 9000, ca=True
        )
        self.middle = self.certificate(
            "middle", self.middle_name, middle.public_key(), self.root_name, root, start, 8000, ca=True
        )
        self.start, self.middle_key = start, middle
        private = serialization.load_pem_private_key(Path(self.key).read_bytes(), None)
        self.leaf_key = private.public_key()
        # one that is long over when it is checked
        self.leaf = self.certificate("leaf", name("Signer"), self.leaf_key, self.middle_name, middle, start, 30)
        for called, subject in (("impostor", name("Root")), ("stranger", name("Elsewhere"))):
            by = ec.generate_private_key(ec.SECP256R1())
            path = self.certificate(called, subject, by.public_key(), subject, by, start, 9000, ca=True)
            setattr(self, called, path)

    def pair(self, called: str, private: Any, password: bytes | None = None) -> tuple[str, str]:
        how: Any = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
        key, public = self.folder / f"{called}.pem", self.folder / f"{called}.pub.pem"
        key.write_bytes(private.private_bytes(PEM, PKCS8, how))
        public.write_bytes(private.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo))
        return str(key), str(public)

    def certificate(
        self, called: str, subject: x509.Name, public: Any, issuer: x509.Name, by: Any, start: datetime, days: int,
        ca: bool = False, usage: bool = True,
    ) -> str:  # fmt: skip
        made = (
            x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(public).serial_number(7 + days)
            .not_valid_before(start).not_valid_after(start + timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        )  # fmt: skip
        if ca or usage:
            made = made.add_extension(
                x509.KeyUsage(not ca, False, False, False, False, ca, ca, False, False), critical=True
            )
        else:
            made = made.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), critical=False)
        path = self.folder / f"{called}.crt.pem"
        path.write_bytes(made.sign(by, hashes.SHA256()).public_bytes(PEM))
        return str(path)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the network was asked for")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def unpacked(folder: Path, files: dict[str, bytes]) -> Path:
    """The folder that `tar --zstd -x` makes of an archive with these members."""
    zstandard = pytest.importorskip("zstandard")
    plain = folder / "a.tar"
    with tarfile.open(plain, "w", format=tarfile.GNU_FORMAT) as tar:
        for n, data in files.items():
            path = folder / "member"
            path.write_bytes(data)
            tar.add(path, n)
    packed = folder / "a.tar.zst"
    packed.write_bytes(zstandard.ZstdCompressor().compress(plain.read_bytes()))
    out = folder / "unpacked"
    out.mkdir()
    subprocess.run(["tar", "--zstd", "-xf", packed, "-C", out], check=True)
    return out


def peer(*args: object) -> subprocess.CompletedProcess[str]:
    """model-signing's own command line."""
    return subprocess.run(
        [sys.executable, "-m", "model_signing", *map(str, args)], capture_output=True, text=True, check=False
    )


def peer_verdict(folder: Path, keys: Keys, mode: str) -> bool:
    how = (
        ["key", folder, "--public_key", keys.public]
        if mode == "key"
        else ["certificate", folder, "--certificate_chain", keys.root]
    )
    found = peer("verify", *how, "--signature", folder / "model.sig")
    assert found.returncode in (0, 1)
    assert ("Verification succeeded" in found.stdout) == (found.returncode == 0), found.stderr
    return found.returncode == 0


def signed(keys: Keys, mode: str, files: dict[str, bytes] = FILES) -> bytes:
    more: dict[str, Any] = {} if mode == "key" else {"certificate": keys.leaf, "chain": [keys.middle]}
    return signing.sign_files(listed(files), "a.tar.zst", key=keys.key, **more)


def trusted(keys: Keys, mode: str) -> dict[str, Any]:
    return {"public_key": keys.public} if mode == "key" else {"certificates": [keys.root]}


@pytest.mark.parametrize("mode", ["key", "certificate"])
def test_our_bundle_is_good_to_model_signing_over_the_unpacked_folder(keys: Keys, tmp_path: Path, mode: str) -> None:
    bundle = signed(keys, mode)
    folder = unpacked(tmp_path, {**FILES, "model.sig": bundle})
    assert peer_verdict(folder, keys, mode)
    # the signature may also lie elsewhere, while a copy stays in the folder
    aside = tmp_path / "aside.sig"
    shutil.copy(folder / "model.sig", aside)
    how = ["--public_key", keys.public] if mode == "key" else ["--certificate_chain", keys.root]
    assert peer("verify", mode, folder, "--signature", aside, *how).returncode == 0
    signing.verify_signature(bundle, listed(FILES), **trusted(keys, mode))


@pytest.mark.parametrize("mode", ["key", "certificate"])
def test_the_bundle_of_model_signing_is_good_to_us(keys: Keys, tmp_path: Path, mode: str) -> None:
    folder = unpacked(tmp_path, FILES)
    how = ["--private_key", keys.key]
    if mode == "certificate":
        how += ["--signing_certificate", keys.leaf, "--certificate_chain", keys.middle]
    made = peer("sign", mode, folder, "--signature", folder / "model.sig", *how)
    assert made.returncode == 0, made.stderr
    bundle = (folder / "model.sig").read_bytes()
    assert signing.verify_signature(bundle, listed(FILES), **trusted(keys, mode)) == signing.describe_signer(bundle)
    assert json.loads(bundle)["mediaType"] == json.loads(signed(keys, mode))["mediaType"]


ALTERED = {
    "changed": {**FILES, "values.json": b"{ }\n"},
    "not signed": {**FILES, "evil.bin": b"x"},
    "missing": {n: d for n, d in FILES.items() if n != "values.json"},
}


@pytest.mark.parametrize("fault", ALTERED)
@pytest.mark.parametrize("mode", ["key", "certificate"])
def test_altered_files_are_refused_by_both(keys: Keys, tmp_path: Path, mode: str, fault: str) -> None:
    bundle = signed(keys, mode)
    culprit = "evil.bin" if fault == "not signed" else "values.json"
    with pytest.raises(Differs, match=rf"the signature is good, but .* \({fault}: {culprit}\)"):
        signing.verify_signature(bundle, listed(ALTERED[fault]), **trusted(keys, mode))
    assert not peer_verdict(unpacked(tmp_path, {**ALTERED[fault], "model.sig": bundle}), keys, mode)


def test_another_key_is_refused_by_both(keys: Keys, tmp_path: Path) -> None:
    bundle = signing.sign_files(listed(FILES), "x", key=keys.other)
    with pytest.raises(Differs, match="made with a different key"):
        signing.verify_signature(bundle, listed(FILES), public_key=keys.public)
    assert not peer_verdict(unpacked(tmp_path, {**FILES, "model.sig": bundle}), keys, "key")
    # a forger says it was the right key
    forged = json.loads(bundle)
    forged["verificationMaterial"]["publicKey"]["hint"] = hashlib.sha256(Path(keys.public).read_bytes()).hexdigest()
    with pytest.raises(Differs, match="the signature is invalid: it does not match the signed content"):
        signing.verify_signature(json.dumps(forged).encode(), listed(FILES), public_key=keys.public)


def test_a_certificate_below_another_root_is_refused_by_both(keys: Keys, tmp_path: Path) -> None:
    bundle = signed(keys, "certificate")
    folder = unpacked(tmp_path, {**FILES, "model.sig": bundle})
    for root, reason in (
        (keys.impostor, "certificate signature failure"),
        (keys.stranger, "unable to get local issuer certificate"),
    ):
        with pytest.raises(Differs, match=f"the signature is invalid: {reason}"):
            signing.verify_signature(bundle, listed(FILES), certificates=[root])
        found = peer("verify", "certificate", folder, "--signature", folder / "model.sig", "--certificate_chain", root)
        assert found.returncode == 1
    both = tmp_path / "roots.pem"
    both.write_bytes(Path(keys.stranger).read_bytes() + Path(keys.root).read_bytes())
    signing.verify_signature(bundle, listed(FILES), certificates=[str(both)])
    # without what stands between, the root says nothing
    alone = signing.sign_files(listed(FILES), "x", key=keys.key, certificate=keys.leaf)
    with pytest.raises(Differs, match="unable to get local issuer certificate"):
        signing.verify_signature(alone, listed(FILES), certificates=[keys.root])
    signing.verify_signature(alone, listed(FILES), certificates=[keys.root, keys.middle])


def test_what_a_certificate_may_be_used_for(keys: Keys) -> None:
    more = {"by": keys.middle_key, "start": keys.start, "days": 40}
    code = keys.certificate("code", name("Code"), keys.leaf_key, keys.middle_name, usage=False, **more)
    bundle = signing.sign_files(listed(FILES), "x", key=keys.key, certificate=code, chain=[keys.middle])
    signing.verify_signature(bundle, listed(FILES), certificates=[keys.root])
    ca = keys.certificate("ca", name("No signer"), keys.leaf_key, keys.middle_name, ca=True, **more)
    bundle = signing.sign_files(listed(FILES), "x", key=keys.key, certificate=ca, chain=[keys.middle])
    with pytest.raises(Differs, match="cannot be used for signing"):
        signing.verify_signature(bundle, listed(FILES), certificates=[keys.root])


def test_who_signed(keys: Keys) -> None:
    hint = subprocess.run(["sha256sum", keys.public], capture_output=True, text=True, check=True).stdout.split()[0]
    assert (
        signing.verify_signature(signed(keys, "key"), listed(FILES), **trusted(keys, "key")) == f"EC key SHA256:{hint}"
    )
    leaf = x509.load_pem_x509_certificate(Path(keys.leaf).read_bytes())
    assert signing.verify_signature(signed(keys, "certificate"), listed(FILES), **trusted(keys, "certificate")) == (
        "certificate O=Pr\u00fcfer,CN=Signer, by O=Pr\u00fcfer,CN=Middle, valid 2020-01-01 to 2020-01-31, "
        f"SHA256:{leaf.fingerprint(hashes.SHA256()).hex()}"
    )


def test_a_name_cannot_write_on_the_terminal(keys: Keys) -> None:
    bad = keys.certificate(
        "bad", name("A\n\x1b[2Kgood"), keys.leaf_key, keys.middle_name, keys.middle_key, keys.start, 50
    )
    said = signing.describe_signer(signing.sign_files(listed(FILES), "x", key=keys.key, certificate=bad))
    assert said.isprintable() and "\\x1b[2Kgood" in said


def test_describe_needs_no_library(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    by_key, by_certificate = signed(keys, "key"), signed(keys, "certificate")
    there = builtins.__import__

    def missing(what: str, *args: Any, **more: Any) -> Any:
        if what.partition(".")[0] in ("model_signing", "cryptography"):
            raise ModuleNotFoundError(f"No module named {what!r}")
        return there(what, *args, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    assert (
        signing.describe_signer(by_key) == f"EC key SHA256:{hashlib.sha256(Path(keys.public).read_bytes()).hexdigest()}"
    )
    der = base64.b64decode(
        json.loads(by_certificate)["verificationMaterial"]["x509CertificateChain"]["certificates"][0]["rawBytes"]
    )
    assert signing.describe_signer(by_certificate) == f"certificate SHA256:{hashlib.sha256(der).hexdigest()}"
    with pytest.raises(UsageError, match=r"pip install 'ckpttool\[audit\]'"):
        signing.sign_files(listed(FILES), "x", key=keys.key)
    with pytest.raises(UsageError, match=r"pip install 'ckpttool\[audit\]'"):
        signing.verify_signature(by_key, listed(FILES), public_key=keys.public)


@pytest.mark.parametrize("mode", ["key", "certificate"])
def test_a_key_with_a_password(keys: Keys, tmp_path: Path, mode: str) -> None:
    private = serialization.load_pem_private_key(Path(keys.key).read_bytes(), None)
    locked = Keys.pair(keys, "locked", private, b"Pa\xc3\x9fword")[0]
    more: dict[str, Any] = {} if mode == "key" else {"certificate": keys.leaf, "chain": [keys.middle]}
    bundle = signing.sign_files(listed(FILES), "x", key=locked, password="Pa\u00dfword", **more)
    signing.verify_signature(bundle, listed(FILES), **trusted(keys, mode))
    with pytest.raises(UsageError, match=r"locked\.pem is encrypted; give its password"):
        signing.sign_files(listed(FILES), "x", key=locked, **more)
    with pytest.raises(UsageError, match="or the password is another"):
        signing.sign_files(listed(FILES), "x", key=locked, password="no", **more)
    with pytest.raises(UsageError, match=r"signer\.pem has no password"):
        signing.sign_files(listed(FILES), "x", key=keys.key, password="no", **more)


@pytest.mark.parametrize("curve", [ec.SECP384R1(), ec.SECP521R1()])
def test_other_curves(keys: Keys, tmp_path: Path, curve: ec.EllipticCurve) -> None:
    key, public = keys.pair(curve.name, ec.generate_private_key(curve))
    bundle = signing.sign_files(listed(FILES), "x", key=key)
    signing.verify_signature(bundle, listed(FILES), public_key=public)
    folder = unpacked(tmp_path, {**FILES, "model.sig": bundle})
    assert peer("verify", "key", folder, "--signature", folder / "model.sig", "--public_key", public).returncode == 0


def test_keys_that_cannot_be_used(keys: Keys, tmp_path: Path) -> None:
    bundle = signed(keys, "key")
    for private in (
        rsa.generate_private_key(65537, 2048), ed25519.Ed25519PrivateKey.generate(), ec.generate_private_key(ec.SECP256K1()),
    ):  # fmt: skip
        key, public = keys.pair("unfit", private)
        with pytest.raises(UsageError, match=r"unfit\.pem is not an elliptic-curve key on P-256, P-384 or P-521"):
            signing.sign_files(listed(FILES), "x", key=key)
        with pytest.raises(UsageError, match=r"unfit\.pub\.pem is not an elliptic-curve key"):
            signing.verify_signature(bundle, listed(FILES), public_key=public)
    with pytest.raises(UsageError, match=r"signer\.pub\.pem is not a private key in PEM form"):
        signing.sign_files(listed(FILES), "x", key=keys.public)
    with pytest.raises(UsageError, match=r"signer\.pem is not a public key in PEM form"):
        signing.verify_signature(bundle, listed(FILES), public_key=keys.key)
    with pytest.raises(UsageError, match=r"nowhere cannot be read: No such file"):
        signing.sign_files(listed(FILES), "x", key=str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        signing.verify_signature(bundle, listed(FILES), public_key=str(tmp_path))
    with pytest.raises(UsageError, match="is not the certificate of"):
        signing.sign_files(listed(FILES), "x", key=keys.other, certificate=keys.leaf)
    with pytest.raises(UsageError, match=r"signer\.pub\.pem holds no certificates"):
        signing.sign_files(listed(FILES), "x", key=keys.key, certificate=keys.public)
    with pytest.raises(UsageError, match=r"signer\.pub\.pem holds no certificates"):
        signing.sign_files(listed(FILES), "x", key=keys.key, certificate=keys.leaf, chain=[keys.public])
    with pytest.raises(UsageError, match=r"signer\.pub\.pem holds no certificates"):
        signing.verify_signature(signed(keys, "certificate"), listed(FILES), certificates=[keys.public])


def test_what_proves_a_signature_must_be_given(keys: Keys) -> None:
    with pytest.raises(UsageError, match=r"was signed with a key .*give public_key"):
        signing.verify_signature(signed(keys, "key"), listed(FILES))
    with pytest.raises(UsageError, match="with a key, not with a certificate"):
        signing.verify_signature(signed(keys, "key"), listed(FILES), certificates=[keys.root])
    # the library would take the roots of the web, below which everybody has a certificate
    with pytest.raises(UsageError, match="give certificates, the root that you trust"):
        signing.verify_signature(signed(keys, "certificate"), listed(FILES), public_key=keys.public)


def test_a_key_is_never_on_a_disk_or_in_the_bundle(keys: Keys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    seen: list[str] = []
    remove = shutil.rmtree
    for name in ("shutil.rmtree", "tempfile._rmtree"):  # the latter before Python 3.11.4
        monkeypatch.setattr(name, lambda p, *a, **k: (seen.extend(os.listdir(p)), remove(p, *a, **k)), raising=False)
    before = len(os.listdir("/proc/self/fd"))
    bundle = signed(keys, "certificate")
    assert seen == ["model.sig"] and not list(tmp_path.iterdir())
    assert len(os.listdir("/proc/self/fd")) == before
    assert b"PRIVATE" not in bundle


@pytest.mark.parametrize(
    "bundle",
    [
        b"", b"{}", b"[]", b"null", b"\xff", b'{"mediaType": "application/json"}', b'{"mediaType": 5}',
        b'{"mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json"}',
    ],
)  # fmt: skip
def test_no_bundle(keys: Keys, bundle: bytes) -> None:
    for f in (signing.describe_signer, lambda b: signing.verify_signature(b, listed(FILES), public_key=keys.public)):
        with pytest.raises(Corrupt, match=r"model\.sig"):
            f(bundle)


def test_damaged_bundles(keys: Keys) -> None:
    good = json.loads(signed(keys, "key"))

    def edited(*path: Any, to: Any) -> bytes:
        tree = json.loads(json.dumps(good))
        at = tree
        for k in path[:-1]:
            at = at[k]
        at[path[-1]] = to
        return json.dumps(tree).encode()

    for bundle in (
        edited("dsseEnvelope", "payload", to="?"), edited("dsseEnvelope", "payload", to=7),
        edited("dsseEnvelope", "signatures", to=[]), edited("dsseEnvelope", "signatures", 0, "sig", to="="),
        edited("verificationMaterial", to=None), edited("verificationMaterial", "publicKey", to=7),
        edited("verificationMaterial", "publicKey", "hint", to="\x1b[2K"), edited("more", to=1),
        edited("verificationMaterial", to={"x509CertificateChain": {"certificates": []}}),
        edited("verificationMaterial", to={"x509CertificateChain": {"certificates": [{"rawBytes": "?"}]}}),
    ):  # fmt: skip
        with pytest.raises(Corrupt, match=r"model\.sig is not a signature bundle, or damaged"):
            signing.verify_signature(bundle, listed(FILES), public_key=keys.public)
    nonsense = edited("verificationMaterial", to={"x509CertificateChain": {"certificates": [{"rawBytes": "AAAA"}]}})
    with pytest.raises(Corrupt, match="a certificate that cannot be read"):
        signing.describe_signer(nonsense)
    with pytest.raises((Corrupt, Differs), match=r"model\.sig"):
        signing.verify_signature(nonsense, listed(FILES), certificates=[keys.root])
    old = edited("verificationMaterial", "publicKey", to={"rawBytes": "AAAA"})
    for f in (signing.describe_signer, lambda b: signing.verify_signature(b, listed(FILES), public_key=keys.public)):
        with pytest.raises(Unsupported, match=r"model-signing before 1\.0"):
            f(old)
    twice = json.dumps(good)[:-1] + ', "mediaType": "x"}'
    with pytest.raises(Unsafe, match="is there twice"):
        signing.verify_signature(twice.encode(), listed(FILES), public_key=keys.public)
    payload = json.loads(base64.b64decode(good["dsseEnvelope"]["payload"]))
    payload["predicate"]["resources"][0]["digest"] = "0" * 64
    changed = base64.b64encode(json.dumps(payload).encode()).decode()
    with pytest.raises(Differs, match="the signature is invalid"):
        signing.verify_signature(edited("dsseEnvelope", "payload", to=changed), listed(FILES), public_key=keys.public)


@pytest.mark.parametrize("mode", ["key", "certificate"])
def test_flipped_bits_prove_nothing_else(keys: Keys, mode: str) -> None:
    """A bit flipped anywhere in a bundle: refused, or in a place that no signature covers and says nothing else."""
    import random

    dice = random.Random(5)
    bundle = signed(keys, mode)
    said, refused = signing.describe_signer(bundle), 0
    for _ in range(150):
        damaged = bytearray(bundle)
        damaged[dice.randrange(len(damaged))] ^= 1 << dice.randrange(8)
        try:
            who = signing.verify_signature(bytes(damaged), listed(FILES), **trusted(keys, mode))
        except (Corrupt, Differs, Unsafe):
            refused += 1
        else:
            assert who == said
    assert refused >= 140


def test_sharded_bundles_are_for_their_own_tool(keys: Keys, tmp_path: Path) -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import model_signing
    folder = unpacked(tmp_path, FILES)
    how = model_signing.hashing.Config().use_shard_serialization(shard_size=1000)
    config = model_signing.signing.Config().use_elliptic_key_signer(private_key=keys.key).set_hashing_config(how)
    config.sign(folder, tmp_path / "s.sig")
    with pytest.raises(Unsupported, match=r"signs the 'sha256[^']*' of 'shards'"):
        signing.verify_signature((tmp_path / "s.sig").read_bytes(), listed(FILES), public_key=keys.public)


def test_the_order_of_the_files_plays_no_part(keys: Keys) -> None:
    bundle = signing.sign_files(listed(FILES)[::-1], "x", key=keys.key)
    signing.verify_signature(bundle, listed(FILES), public_key=keys.public)
    statement = json.loads(base64.b64decode(json.loads(bundle)["dsseEnvelope"]["payload"]))
    assert statement["predicate"]["serialization"] == {
        "method": "files", "hash_type": "sha256", "allow_symlinks": False, "ignore_paths": ["model.sig"],
    }  # fmt: skip
    assert {r["name"]: r["digest"] for r in statement["predicate"]["resources"]} == dict(listed(FILES))
