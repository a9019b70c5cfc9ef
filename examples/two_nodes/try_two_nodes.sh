#!/bin/bash
# A two-node torchrun on one machine: two network namespaces stand for two hosts, joined by a virtual cable. Needs root and iproute2.
#
#     examples/two_nodes/try_two_nodes.sh [PROCESSES A NODE] SCRIPT [arguments of the script]
#
# What runs in each namespace is what you would type on each of two hosts; only the addresses differ.
set -euo pipefail

per_node=1
if [[ "$1" =~ ^[0-9]+$ ]]; then
    per_node="$1"
    shift
fi

a="first-$$" b="second-$$" cable_a="va$$" cable_b="vb$$"
pids=()
# shellcheck disable=SC2329  # the trap calls it
finish() {
    for pid in "${pids[@]}"; do kill "$pid" 2> /dev/null || true; done
    ip netns del "$a" 2> /dev/null || true
    ip netns del "$b" 2> /dev/null || true
}
trap finish EXIT

ip netns add "$a"
ip netns add "$b"
ip link add "$cable_a" netns "$a" type veth peer name "$cable_b" netns "$b"
ip -n "$a" address add 10.77.0.1/24 dev "$cable_a"
ip -n "$b" address add 10.77.0.2/24 dev "$cable_b"
for side in "$a $cable_a" "$b $cable_b"; do
    read -r host cable <<< "$side"
    ip -n "$host" link set lo up
    ip -n "$host" link set "$cable" up
done

# node HOST CABLE ADDRESS HOLDS_MEETING SCRIPT ...: what one host runs
node() {
    local host="$1" cable="$2" address="$3" holds="$4"
    shift 4
    # gloo and NCCL are told which network to use: the hostname may stand for another one
    exec ip netns exec "$host" env GLOO_SOCKET_IFNAME="$cable" NCCL_SOCKET_IFNAME="$cable" \
        python -m torch.distributed.run --nnodes=2 --nproc-per-node="$per_node" \
        --rdzv-id=two-nodes --rdzv-backend=c10d --rdzv-endpoint=10.77.0.1:29400 \
        --rdzv-conf=is_host="$holds" --local-addr="$address" "$@"
}

node "$a" "$cable_a" 10.77.0.1 true "$@" &
pids+=($!)
node "$b" "$cable_b" 10.77.0.2 false "$@" &
pids+=($!)
status=0
for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
exit "$status"
