#!/usr/bin/env bash
# Cross-compiles the macOS arm64 wheel on Linux and audits it, or audits a wheel that a Mac built; see
# scripts/macos/README.md.
set -euo pipefail

usage="usage: $0 [--python 3.11|3.12|3.13|3.14] [--out DIR] [--negative-controls] | --audit WHEEL"
root=$(realpath "$(dirname "$0")/..")
python=3.11
out=$root/build/macos/wheels
controls=false
wheel=

fail() {
  echo "$1" >&2
  exit 2
}

while (($#)); do
  case $1 in
    --python) python=${2:?$usage}; shift ;;
    --out) out=$(realpath -m "${2:?$usage}"); shift ;;
    --negative-controls) controls=true ;;
    --audit) wheel=$(realpath -m "${2:?$usage}"); shift ;;
    *) fail "$usage" ;;
  esac
  shift
done

[[ -n $wheel ]] || for tool in ld64.lld-19 llvm-{ar,ranlib,install-name-tool,otool}-19; do
  command -v "$tool" >/dev/null || fail "$tool is missing: apt-get install lld-19 llvm-19"
done
"python$python" -c "" || fail "python$python is missing"

cd "$root"
macos=14.0
mlx=$("python$python" -m scripts.macos.pins mlx)
# Not linked; its binaries show which symbols Apple's libraries have.
witness=pyarrow==26.0.1

work=$root/build/macos/py$python
packages=$work/$mlx-$witness
stubs=$packages/stubs
export PATH=$work/venv/bin:$PATH

echo "+ tools"
[[ -x $work/venv/bin/pip ]] || "python$python" -m venv --clear "$work/venv"
python -m scripts.macos.pins tools |
  pip install --quiet --requirement /dev/stdin ziglang==0.17.0 lief==1.0.0 ninja packaging

echo "+ $mlx for macOS"
if [[ ! -d $packages ]]; then
  rm -rf "$packages.part"
  pip install --quiet --target "$packages.part" --no-deps --only-binary=:all: \
    --platform "macosx_${macos/./_}_arm64" --python-version "$python" \
    "$mlx" "${mlx/mlx/mlx-metal}" "$witness"
  mv "$packages.part" "$packages"
fi
python -m scripts.macos.write_stubs "$packages" "$stubs"

if [[ -n $wheel ]]; then
  python -m scripts.macos.audit_wheel "$wheel" --packages "$packages" --stubs "$stubs"
  exit
fi

echo "+ wheel"
# setuptools and CMake take the platform from these; what they write stays below build/macos.
suffix=.cpython-${python/./}-darwin.so
export MACOSX_DEPLOYMENT_TARGET=$macos
export _PYTHON_HOST_PLATFORM=macosx-$macos-arm64
export SETUPTOOLS_EXT_SUFFIX=$suffix
export CMAKE_GENERATOR=Ninja
export CMAKE_ARGS="-DCMAKE_TOOLCHAIN_FILE=$root/scripts/macos/toolchain/darwin-arm64.cmake
  -DMACOS_LINK_STUBS=$stubs -DMLX_ROOT=$packages/mlx -DMACOS_EXT_SUFFIX=$suffix"
export ZIG_GLOBAL_CACHE_DIR=$root/build/macos/zig ZIG_LOCAL_CACHE_DIR=$work/zig
export DIST_EXTRA_CONFIG=$work/setup.cfg
rm -rf "$work/build" "$work/wheel"
mkdir -p "$work/build" "$out"
printf '[build]\nbuild_base = %s\n[egg_info]\negg_base = %s\n' "$work/build" "$work/build" \
  >"$DIST_EXTRA_CONFIG"
pip wheel --quiet --no-deps --no-build-isolation --no-cache-dir --wheel-dir "$work/wheel" .

echo "+ audit"
wheel=$(echo "$work"/wheel/*.whl)
audited=("$wheel" --packages "$packages" --stubs "$stubs")
python -m scripts.macos.audit_wheel "${audited[@]}"
if $controls; then
  echo "+ negative controls"
  python -m scripts.macos.negative_controls "${audited[@]}" --build "$work/build"
fi
cp "$wheel" "$out"
echo "$out/$(basename "$wheel")"
