#!/usr/bin/env bash
# Run N NCCL ranks on one GPU.
#
#   tools/ranks_on_one_gpu.sh N COMMAND...
#
# Every rank gets RANK, WORLD_SIZE, LOCAL_RANK=0, MASTER_ADDR and MASTER_PORT, and has to use cuda:0. Rank 0's output is
# shown, every rank's is kept in LOGS. The first rank to fail ends the others, and the end of its log is shown.
# docs/several_ranks_on_one_gpu.md says how and why this works.
#
# From the environment:
#   LOGS                              where the ranks' output goes (default: runs/ranks)
#   RANKS_TIMEOUT                     seconds until a run is ended (default 300)
#   NCCL_LIBRARY                      a libnccl.so.2 of 2.30 or newer (default: the one that torch brings)
#   PYTHON                            the python that has torch (default python3)
#   NCCL_MAX_NCHANNELS                multiprocessors that one rank's collective may take (default 4)
#   CUDA_MPS_ACTIVE_THREAD_PERCENTAGE share of the GPU that one rank may use (default 100 / N)
set -u

if (($# < 2)) || ! [[ $1 =~ ^[1-9][0-9]*$ ]]; then
  sed -n '2,4p' "$0" | cut -c3-
  exit 2
fi
ranks=$1
shift
logs=${LOGS:-runs/ranks}
limit=${RANKS_TIMEOUT:-300}
mkdir -p "$logs"

# The library that torch brings, unless the caller has a newer one.
library=${NCCL_LIBRARY:-}
if [[ -z $library ]]; then
  library=$("${PYTHON:-python3}" - <<'PY'
import ctypes, importlib.util, pathlib

spec = importlib.util.find_spec("nvidia.nccl") if importlib.util.find_spec("nvidia") else None
folders = [pathlib.Path(folder) / "lib" for folder in (spec.submodule_search_locations or ())] if spec else []
torch = importlib.util.find_spec("torch")
if torch is not None and torch.origin:
    folders.append(pathlib.Path(torch.origin).parent / "lib")
found = [folder / "libnccl.so.2" for folder in folders if (folder / "libnccl.so.2").exists()]
try:
    ctypes.CDLL("libnccl.so.2")
    found.append("libnccl.so.2")  # the system's own
except OSError:
    pass
print(next(map(str, found), ""))
PY
  )
fi
if [[ -n $library ]]; then
  version=$("${PYTHON:-python3}" - "$library" <<'PY'
import ctypes, sys

value = ctypes.c_int()
ctypes.CDLL(sys.argv[1]).ncclGetVersion(ctypes.byref(value))
print(value.value)
PY
  )
  if ((ranks > 1 && ${version:-0} < 23000)); then
    echo "ranks_on_one_gpu.sh: $library is NCCL ${version:-unknown}; several ranks on one GPU need 2.30 (23000) or newer." >&2
    echo "Install a newer nvidia-nccl wheel somewhere and name its libnccl.so.2 in NCCL_LIBRARY." >&2
    exit 1
  fi
else
  echo "ranks_on_one_gpu.sh: found no libnccl.so.2; name one (2.30 or newer) in NCCL_LIBRARY" >&2
  exit 1
fi

export NCCL_MULTI_RANK_GPU_ENABLE=1                     # NCCL refuses two ranks of one GPU otherwise
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}          # no multicast within one GPU
export NCCL_MIN_NCHANNELS=${NCCL_MIN_NCHANNELS:-1} NCCL_MAX_NCHANNELS=${NCCL_MAX_NCHANNELS:-4}
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-8} # under MPS 2, and streams block one another
export CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=${CUDA_MPS_ACTIVE_THREAD_PERCENTAGE:-$((100 / ranks))}
export WORLD_SIZE=$ranks LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=${MASTER_PORT:-$((29500 + RANDOM % 2000))}

# MPS lets the kernels of several processes run at the same time. A daemon that is there already is used, and left alone.
scratch=$(mktemp -d)
export PATH=$PATH:/usr/local/nvidia/bin
export CUDA_MPS_PIPE_DIRECTORY=${CUDA_MPS_PIPE_DIRECTORY:-$scratch/pipe} CUDA_MPS_LOG_DIRECTORY=${CUDA_MPS_LOG_DIRECTORY:-$scratch/log}
mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
started=
if nvidia-cuda-mps-control -d 2>/dev/null; then
  started=yes
  sleep 1
elif ! command -v nvidia-cuda-mps-control >/dev/null; then
  echo "ranks_on_one_gpu.sh: no nvidia-cuda-mps-control; without MPS the ranks take turns, and collectives are slow" >&2
fi

declare -A rank_of
finish() {
  ((${#rank_of[@]})) && kill "${!rank_of[@]}" 2>/dev/null
  [[ -n $started ]] && echo quit | nvidia-cuda-mps-control >/dev/null 2>&1
  rm -rf "$scratch"
}
trap finish EXIT
trap 'exit 130' INT TERM

for ((rank = 0; rank < ranks; rank++)); do
  if ((rank == 0)); then
    RANK=0 LD_PRELOAD=$library timeout -k 5 "$limit" "$@" > >(tee "$logs/rank0.log") 2>&1 &
  else
    RANK=$rank LD_PRELOAD=$library timeout -k 5 "$limit" "$@" >"$logs/rank$rank.log" 2>&1 &
  fi
  rank_of[$!]=$rank
done

status=0
while ((${#rank_of[@]})); do
  code=0
  wait -n -p ended "${!rank_of[@]}" || code=$?
  rank=${rank_of[$ended]}
  unset "rank_of[$ended]"
  if ((code != 0 && status == 0)); then
    status=$code
    echo "--- rank $rank ended with $code; the end of $logs/rank$rank.log:"
    tail -n 40 "$logs/rank$rank.log"
    ((${#rank_of[@]})) && sleep 2 && kill "${!rank_of[@]}" 2>/dev/null
  fi
done
exit $status
