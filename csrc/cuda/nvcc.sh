# Calls nvcc, and writes ptxas's report of registers and spills to `<object>.ptxas`.
for argument do
  [ "$previous" = -o ] && object=$argument
  previous=$argument
done
# Not quoted: PYTORCH_NVCC may be "ccache nvcc".
${PREACT_KERNELS_NVCC:-nvcc} "$@" -Xptxas=-v >"$object.ptxas" 2>&1
status=$?
[ $status = 0 ] || { cat "$object.ptxas" >&2; rm "$object.ptxas"; }
exit $status
