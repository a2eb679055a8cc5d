"""Whether a server's doors could open: addresses, keys, and the server behind. Binds for a moment, sends nothing."""

import ssl

from holdfast.cli.checks import Finding
from holdfast.config import ServeConfig, UpstreamConfig
from holdfast.errors import ConfigError
from holdfast.serving.keys import Keys, check_bind, check_free, read_keys, split_address


def judge_doors(doors: ServeConfig, upstream: UpstreamConfig) -> list[Finding]:
    findings = []
    keys = Keys()
    try:
        keys = read_keys(doors.keys_file)
    except ConfigError as exc:
        findings.append(Finding("keys", "problem", str(exc)))
    if doors.tls_cert or doors.tls_key:
        findings.append(_judge_certificate(doors.tls_cert, doors.tls_key))
    findings.append(_judge_address("gRPC door", doors.grpc, keys, insecure=doors.insecure))
    if not doors.http:
        findings.append(Finding("HTTP door", "ok", "none: --http HOST:PORT opens it"))
    elif doors.http == doors.grpc and not doors.grpc.endswith(":0"):
        findings.append(Finding("HTTP door", "problem", f"{doors.http} is the gRPC door's too: choose another address"))
    else:
        findings.append(_judge_address("HTTP door", doors.http, keys, insecure=doors.insecure))
    if doors.backend == "embedded":
        if upstream.upstream:
            findings.append(Finding("upstream", "problem", "--upstream URL goes with --backend sglang or vllm"))
    elif upstream.upstream:
        findings.append(Finding("upstream", "ok", f"{doors.backend} at {upstream.upstream}, which was not asked"))
    else:
        findings.append(Finding("upstream", "problem", f"--backend {doors.backend} needs --upstream URL"))
    return findings


def _judge_address(what: str, address: str, keys: Keys, *, insecure: bool) -> Finding:
    try:
        check_bind(address, keys, insecure=insecure)
        check_free(address)
    except ConfigError as exc:
        return Finding(what, "problem", str(exc))
    is_open = split_address(address)[1] == 0
    return Finding(what, "ok", f"{address} is {'any free port' if is_open else 'free'}")


def _judge_certificate(chain: str, key: str) -> Finding:
    if not (chain and key):
        return Finding("TLS", "problem", "TLS needs both --tls-cert and --tls-key")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(chain, key)
    except ssl.SSLError:
        return Finding("TLS", "problem", f"{chain} and {key} are not a certificate and its key: give a pair in PEM")
    except OSError as exc:
        return Finding("TLS", "problem", f"cannot read {chain} or {key}: {exc.strerror}; give files that can be read")
    return Finding("TLS", "ok", f"{chain} and its key")
