#!/bin/sh
# One-shot services of compose.tls.yaml; the Helm chart uses `register`, too.
#   keys      make the missing keys, and copy each container's own to its volume: the CA's certificate, one node's private keys,
#             and the list of all nodes' public keys for private runs
#   register  register the SuperNodes' public keys with the SuperLink
set -eu
case "$1" in
keys)
  chmod 700 /keys/all
  corolla cluster keys /app/deploy/compose-cluster.yaml
  give() { # give DIRECTORY FILE...: only the containers' user can read the copies
    directory=$1
    shift
    chmod 700 "$directory"
    for file in "$@"; do install -m 600 "/keys/all/$file" "$directory/$file"; done
  }
  give /keys/superlink ca.crt server.crt server.key supernode-0.pub supernode-1.pub supernode-2.pub supernode-3.pub
  for k in 0 1 2 3; do
    give "/keys/$k" ca.crt peers.txt "supernode-$k.key" "supernode-$k.x25519"
    for end in key x25519; do mv "/keys/$k/supernode-$k.$end" "/keys/$k/supernode.$end"; done
  done
  ;;
register)
  for public in /keys/supernode-*.pub; do
    name=$(basename "$public" .pub)
    said=$(flwr supernode register "$public" cluster-tls --name "$name" 2>&1) || case "$said" in
    *"already in use"*) said="$name is registered" ;; # by a database that was kept
    *) echo "$said" >&2 && exit 1 ;;
    esac
    echo "$said"
  done
  ;;
*)
  echo "usage: $0 keys|register" >&2
  exit 2
  ;;
esac
