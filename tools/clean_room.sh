#!/usr/bin/env bash
# Tries the wheels as a stranger would: in a bare Debian with Python, curl and nothing else (no compiler, no torch).
#
#   sudo tools/clean_room.sh bookworm DIR      # Python 3.11; the root is made in DIR with debootstrap, or used again
#   sudo tools/clean_room.sh trixie DIR        # Python 3.13
#
# Needs debootstrap (MIRROR: another mirror than its own) and unshare, and a C++ compiler on this machine to build the
# wheels. PYTHON builds them (default: .venv/bin/python). This machine's name server, certificates and PIP_INDEX_URL are used inside. Ends with 1 if a command
# failed, printed a traceback, or said in more than one line what is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
suite=${1:?which Debian: bookworm or trixie} root=${2:?a folder for its root}

if [ ! -x "$root/usr/bin/python3" ]; then
    debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates,curl "$suite" "$root" ${MIRROR:+"$MIRROR"} >/dev/null
fi
rm -rf "$root/try" && mkdir -p "$root/try/dist"
"${PYTHON:-.venv/bin/python}" -m pip wheel --quiet --no-deps -w "$root/try/dist" . ./sdks/python
cp /etc/resolv.conf "$root/etc/resolv.conf"
cp /etc/ssl/certs/ca-certificates.crt "$root/try/certificates.crt"

cat >"$root/try/inside.sh" <<'INSIDE'
set -uo pipefail
cd /try
export HOME=/try PIP_CERT=/try/certificates.crt PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_QUIET=1
failures=0

# try NAME EXPECTED COMMAND...: EXPECTED is `works`, `fails`, or `says`: fails with one line. Never a traceback.
try() {
    local name=$1 expected=$2 status=0 start=$SECONDS; shift 2
    "$@" >output 2>&1 </dev/null || status=$?
    local verdict=ok
    if grep -q Traceback output; then verdict="FAILED: a traceback"
    elif [ "$expected" = works ] && [ $status != 0 ]; then verdict="FAILED: status $status"
    elif [ "$expected" != works ] && [ $status = 0 ]; then verdict="FAILED: status 0"
    elif [ "$expected" = says ] && [ "$(grep -c . output)" != 1 ]; then verdict="FAILED: not one line"
    fi
    [ "$verdict" = ok ] || failures=$((failures + 1))
    printf '\n== %s (%s s): %s\n' "$name" $((SECONDS - start)) "$verdict"
    tail -n "${LINES_SHOWN:-40}" output | sed 's/^/   /'
}

serve_and_ask() {
    venv/bin/holdfast serve --grpc "$grpc" --http "$http" >serve.log 2>&1 &
    local server=$!
    for _ in $(seq 120); do
        curl -sf "http://$http/readyz" >/dev/null && break
        kill -0 $server 2>/dev/null || { cat serve.log; return 1; }
        sleep 0.5
    done
    local session status=0
    session=$(curl -sf -X POST "http://$http/sessions" | sed -E 's/.*"session_id": *"([^"]*)".*/\1/')
    curl -sf "http://$http/sessions/$session/v1/chat/completions" -H 'content-type: application/json' \
        -d '{"model": "any", "temperature": 0, "max_tokens": 16, "messages": [{"role": "user", "content": "What is the capital of France?"}]}' || status=$?
    [ -z "${WITH_SDK:-}" ] || venv/bin/holdfast sessions list --server "$grpc" || status=$?
    kill -TERM $server; wait $server || status=$?
    grep Traceback serve.log || true
    return $status
}

for tool in cc gcc g++ clang c++; do ! command -v $tool >/dev/null || { echo "there is a compiler: $tool"; exit 1; }; done
. /etc/os-release; echo "$PRETTY_NAME, $(python3 --version), $(ls dist | tr '\n' ' ')"
python3 -m venv venv
free() { python3 -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print("127.0.0.1:%d" % s.getsockname()[1])'; }
grpc=$(free) http=$(free)
server=$(echo dist/holdfast_llm-*.whl) sdk=$(echo dist/holdfast_llm_sdk-*.whl)
try "install the wheel" works venv/bin/pip install "./$server"
try "doctor without a model" fails venv/bin/holdfast doctor --grpc "$grpc" --http "$http"
try "serve without a model" says venv/bin/holdfast serve
try "chat without a model" says venv/bin/holdfast chat "What is the capital of France?"
try "models pull" works venv/bin/holdfast models pull
try "doctor" works venv/bin/holdfast doctor --grpc "$grpc" --http "$http"
try "models" works venv/bin/holdfast models list
try "chat" works venv/bin/holdfast chat "What is the capital of France?"
try "serve, and chat with curl" works serve_and_ask
try "sessions without the SDK" says venv/bin/holdfast sessions list
try "bench without its extra" says venv/bin/holdfast bench long-session --quick
try "torch is asked for" says venv/bin/holdfast serve --grpc "$grpc" --http "$http" --device cuda
try "serve without the native engine" says env HOLDFAST_NATIVE=off venv/bin/holdfast serve --grpc "$grpc" --http "$http"
try "install the extra bench" works venv/bin/pip install "./$server[bench]" "./$sdk"
WITH_SDK=1 try "serve with the SDK" works serve_and_ask
try "bench long-session --quick" works venv/bin/holdfast bench long-session --quick
! venv/bin/python -c "import torch" 2>/dev/null || { echo "torch was installed"; failures=$((failures + 1)); }
echo; echo "$failures failed"
[ $failures = 0 ]
INSIDE
exec unshare --mount --pid --fork --mount-proc="$root/proc" chroot "$root" \
    env -i PATH=/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8 ${PIP_INDEX_URL:+PIP_INDEX_URL="$PIP_INDEX_URL"} bash /try/inside.sh
