#!/bin/sh
# `make cluster-demo`: build, start, run FedCAC on digits, print its table, stop. From the clone's root:
#   deploy/demo.sh [--tls] [--gpu] [--monitored] [more arguments of `corolla run`]
# The run folder is copied to runs/ ($RUNS). At the end containers, network and volumes are removed; the image is kept.
set -eu
cd "$(dirname "$0")/.."
files="-f deploy/compose.yaml"
connection=cluster
monitored=
while :; do
  case "${1:-}" in
  --tls)
    files="$files -f deploy/compose.tls.yaml" connection=cluster-tls
    export KEYS_SUPERLINK=keys-superlink
    ;;
  --gpu) files="$files -f deploy/compose.gpu.yaml" ;;
  --monitored) files="$files -f deploy/compose.monitored.yaml" monitored=1 ;;
  *) break ;;
  esac
  shift
done

docker info >/dev/null 2>&1 || { echo "there is no Docker engine: \`docker info\` fails" >&2; exit 3; }
if docker compose version >/dev/null 2>&1; then
  compose="docker compose"
elif command -v docker-compose >/dev/null; then
  compose=docker-compose
else
  echo "neither \`docker compose\` nor \`docker-compose\` is installed" >&2
  exit 3
fi
compose="$compose -p ${COMPOSE_PROJECT_NAME:-corolla-demo} $files"

finish() {
  status=$?
  trap - EXIT INT TERM
  if [ $status -ne 0 ]; then $compose logs --tail 40 >&2 || true; fi
  $compose down --volumes --timeout 20 || status=1
  exit $status
}
trap finish EXIT
trap 'exit 130' INT TERM

$compose build superlink
$compose up -d
[ -z "$monitored" ] || echo "Grafana: http://127.0.0.1:3000, Prometheus: http://127.0.0.1:9090"
name=${RUN_NAME:-cluster-demo-$(date +%Y%m%d-%H%M%S)}
$compose exec -T superlink corolla run --superlink "$connection" --clients 4 --output-dir /results \
  --set method=fedcac --set num-server-rounds=5 --set fedcac.beta=2 --set "run-name=$name" "$@"
mkdir -p "${RUNS:=runs}"
docker cp "$($compose ps -q superlink):/results/$name" "$RUNS"
echo "copied to $RUNS/$name"
if [ -n "$monitored" ] && [ -t 0 ]; then
  printf 'Grafana stays up until you press Enter: http://127.0.0.1:3000 '
  read -r _
fi
