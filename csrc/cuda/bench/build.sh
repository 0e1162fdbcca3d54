#!/bin/bash
# Builds attention_check and ops_check into a folder, from the repository's root: build.sh FOLDER [FLAGS]
set -e
folder=$1
mkdir -p "$folder"
flags="$2 -O3 -std=c++17 --expt-relaxed-constexpr -diag-suppress 2810 -Xcompiler -fopenmp -Icsrc/include -Icsrc/cuda
  -gencode=arch=compute_90a,code=sm_90a"
attention=(csrc/cuda/{attention*,rope_and_cache_write}.cu)
ops=(csrc/cuda/{gather_rows,rms_norm,silu_mul,sample,adjust_logits}.cu)
pids=()
for source in "${attention[@]}" "${ops[@]}" csrc/cuda/bench/{attention,ops}_check.cu; do
  nvcc $flags -c "$source" -o "$folder/$(basename "$source").o" &
  pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid"; done
objects() { for source in "$@"; do echo "$folder/$(basename "$source").o"; done; }
nvcc -Xcompiler -fopenmp $(objects "${attention[@]}") "$folder/attention_check.cu.o" -o "$folder/attention_check"
nvcc -Xcompiler -fopenmp $(objects "${ops[@]}" csrc/cuda/rope_and_cache_write.cu) "$folder/ops_check.cu.o" -o "$folder/ops_check"
