"""Whether a server's doors could open: addresses, keys, and the server behind. Binds for a moment, sends nothing."""

from holdfast.cli.diagnosis import Finding
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
