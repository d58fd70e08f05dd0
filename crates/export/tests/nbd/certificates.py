"""Make certificates in the folder named: what servers and clients of several kinds have."""

import datetime
import os
import sys

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

root = sys.argv[1]
now = datetime.datetime.utcnow()
day = datetime.timedelta(days=1)
PEM = serialization.Encoding.PEM


def name(text):
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def authority(text):
    key = ec.generate_private_key(ec.SECP256R1())
    cert = (
        x509.CertificateBuilder().subject_name(name(text)).issuer_name(name(text))
        .public_key(key.public_key()).serial_number(x509.random_serial_number())
        .not_valid_before(now - 9 * day).not_valid_after(now + 9 * day)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.KeyUsage(False, False, False, False, False, True, True, False, False), critical=True)
        .sign(key, hashes.SHA256())
    )
    return key, cert


def leaf(ca, text, usage, key, until=now + 8 * day):
    ca_key, ca_cert = ca
    cert = (
        x509.CertificateBuilder().subject_name(name(text)).issuer_name(ca_cert.subject)
        .public_key(key.public_key()).serial_number(x509.random_serial_number())
        .not_valid_before(now - 8 * day).not_valid_after(until)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    return key, cert


def put(folder, **files):
    os.makedirs(os.path.join(root, folder), exist_ok=True)
    for file, content in files.items():
        with open(os.path.join(root, folder, file.replace("_", "-") + ".pem"), "wb") as to:
            to.write(content)


def pem(pair):
    key, cert = pair
    text = key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return cert.public_bytes(PEM), text


def ecc():
    return ec.generate_private_key(ec.SECP256R1())


ours, other = authority("ours"), authority("other")
ca = pem(ours)[0]
SERVER, CLIENT = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH
rsa_key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
cert, key = pem(leaf(ours, "server", SERVER, rsa_key))
put("server", ca_cert=ca, server_cert=cert, server_key=key)

revoked = leaf(ours, "revoked", CLIENT, ecc())
entry = x509.RevokedCertificateBuilder().serial_number(revoked[1].serial_number).revocation_date(now - day).build()
crl = (
    x509.CertificateRevocationListBuilder().issuer_name(ours[1].subject)
    .last_update(now - day).next_update(now + day).add_revoked_certificate(entry)
    .add_extension(x509.CRLNumber(1), critical=False)
    .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ours[0].public_key()), critical=False)
    .sign(ours[0], hashes.SHA256())
)
put("server-crl", ca_cert=ca, server_cert=cert, server_key=key, ca_crl=crl.public_bytes(PEM))
put("server-mixed", ca_cert=ca, server_cert=cert, server_key=pem(revoked)[1])

for folder, pair in {
    "client": leaf(ours, "client", CLIENT, ecc()),
    "stranger": leaf(other, "client", CLIENT, ecc()),
    "expired": leaf(ours, "expired", CLIENT, ecc(), now - day),
    "server-as-client": leaf(ours, "server", SERVER, ecc()),
    "revoked": revoked,
}.items():
    cert, key = pem(pair)
    put(folder, ca_cert=ca, client_cert=cert, client_key=key)
put("nobody", ca_cert=ca)
cert, key = pem(leaf(ours, "client", CLIENT, ecc()))
put("deceived", ca_cert=pem(other)[0], client_cert=cert, client_key=key)
