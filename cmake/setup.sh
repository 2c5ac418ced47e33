#!/usr/bin/env bash
# What a build needs, on a machine with nothing: Debian packages, and .venv with torch and what the tests use. Does nothing where all is there.
#   cmake/setup.sh           .venv with the default torch of python/torch-versions.txt, or that of TSMEM_TORCH
#   cmake/setup.sh other     .venv-2.15 (or what the other is) with the other one there
#   cmake/setup.sh tests     as the first, and what the tests of another processor, of other languages and of pages need, where it can be installed (tests/test_arm64.py, test_languages.py, test_pages.py)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mkdir -p build

die() { echo "set-up: $*" >&2; exit 1; }

# Debian packages
installed() { dpkg-query -W -f '${Status}' "$1" 2>/dev/null | grep -q 'install ok installed'; }
packages=(cmake ninja-build g++ ccache git libcli11-dev nlohmann-json3-dev libdtl-dev libgtest-dev libbenchmark-dev librsvg2-bin python3-venv)
if [ "${1:-}" = tests ] && [ "$(uname -m)" = x86_64 ] && { [ "$(id -u)" -eq 0 ] || command -v sudo >/dev/null; }; then
  packages+=(g++-aarch64-linux-gnu qemu-user)
  # The compilers of tests/test_languages.py, where the machine has none of its own.
  command -v gfortran >/dev/null || packages+=(gfortran)
  command -v cargo >/dev/null || packages+=(cargo)
  command -v go >/dev/null || packages+=(golang-go)
fi
if command -v dpkg-query >/dev/null; then
  missing=()
  for p in "${packages[@]}"; do
    installed "$p" || missing+=("$p")
  done
  if [ ${#missing[@]} -gt 0 ]; then
    as_root=()
    if [ "$(id -u)" -ne 0 ]; then
      command -v sudo >/dev/null || die "these packages are missing, and there is neither root nor sudo to install them: ${missing[*]}"
      as_root=(sudo)
    fi
    echo "set-up: installing ${missing[*]}"
    "${as_root[@]}" apt-get update -qq || die "apt-get update failed; these packages are missing: ${missing[*]}"
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >build/apt.log 2>&1 ||
      { tail -n 20 build/apt.log >&2; die "apt-get could not install: ${missing[*]}"; }
  fi
  # A browser, which not every distribution has as a package of this name.
  if [ "${1:-}" = tests ] && [ "$(id -u)" -eq 0 ] && ! installed chromium; then
    echo "set-up: installing chromium"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; } >build/apt.log 2>&1 ||
      echo "set-up: chromium could not be installed; tests/test_pages.py says what it leaves out"
  fi
else
  for tool in cmake ninja g++; do command -v "$tool" >/dev/null || die "'$tool' is missing; install what Debian calls: ${packages[*]}"; done
fi

minor_of() { echo "$1" | cut -d. -f1,2; }
mapfile -t versions < <(grep '^[0-9]' python/torch-versions.txt)
oldest=${versions[0]%% *} newest=${versions[1]%% *}
venv=.venv
case "${1:-default}" in
  default | tests) read -r torch vision _ < <(grep '^[0-9].* default$' python/torch-versions.txt) ;;
  other)
    read -r torch vision < <(grep '^[0-9]' python/torch-versions.txt | grep -v ' default$')
    venv=.venv-$(minor_of "$torch") TSMEM_TORCH=""
    ;;
  *) die "'$1' is none of 'default', 'other' and 'tests'." ;;
esac

# Python. With TSMEM_TORCH the environment is made from the Python which that torch is installed for, and finds torch there.
site=""
if [ -n "${TSMEM_TORCH:-}" ]; then
  [ -f "$TSMEM_TORCH/lib/libtorch_cpu.so" ] || die "TSMEM_TORCH='$TSMEM_TORCH' has no lib/libtorch_cpu.so; it must name the torch folder in site-packages."
  version=$(sed -n "s/^__version__ = '\([^']*\)'.*/\1/p" "$TSMEM_TORCH/version.py")
  [ "$(printf '%s\n' "$(minor_of "$oldest")" "$(minor_of "$version")" "$(minor_of "$newest")" | sort -V | sed -n 2p)" = "$(minor_of "$version")" ] ||
    die "TSMEM_TORCH='$TSMEM_TORCH' is torch $version; tsmem works with $(minor_of "$oldest") to $(minor_of "$newest"): install one of these."
  site=$(dirname "$(realpath "$TSMEM_TORCH")")
  [ "$site" != "$(realpath -m "$venv")/lib/$(basename "$(dirname "$site")")/site-packages" ] || site=""  # .venv's own
fi

usable() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; }
python=""
if [ -n "$site" ]; then
  name=$(basename "$(dirname "$site")") # python3.11, or python3 in Debian's dist-packages
  for p in "$site/../../../bin/$name" "$name" python3; do
    # It has to be the Python that torch's extension modules were built for.
    if usable "$p" && PYTHONPATH=$site "$p" -c 'import torch' >/dev/null 2>&1; then python=$p && break; fi
  done
  [ -n "$python" ] || die "found no python3 that can import the torch in '$site'."
else
  for p in python3 python3.13 python3.12 python3.11 python3.10; do
    if usable "$p"; then python=$p && break; fi
  done
  [ -n "$python" ] || die "a python3 of version 3.10 or later with its venv module is needed."
fi

requirements=build/requirements-$(basename "$venv").txt
stamp=$venv/.tsmem-setup
pins() { cat python/requirements.txt; printf '%s\n' "$@"; }
if [ -n "$site" ]; then state="torch from $site"; else state="torch from PyPI"; fi
state="$state; requirements $(pins "torch==$torch" "torchvision==$vision" | sha256sum | cut -d' ' -f1)"
if [ "$(cat $stamp 2>/dev/null)" != "$state" ]; then
  # An environment whose torch came from elsewhere can't be changed into this one.
  if [ -f $stamp ] && [ "$(sed 's/;.*//' $stamp)" != "${state%%;*}" ]; then rm -rf $venv; fi
  [ -x $venv/bin/python ] || "$python" -m venv $venv || die "could not make $venv with $python."
  packages_dir=$($venv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  # `import tsmem` takes the package from python/, and the package finds the library in build/ or build-2.15/.
  { realpath python; [ -z "$site" ] || echo "$site"; } >"$packages_dir/tsmem-build.pth"
  # What an installed package tells torch.compile: the backend's name.
  mkdir -p python/tsmem.egg-info
  printf 'Metadata-Version: 2.1\nName: tsmem\nVersion: 0\n' >python/tsmem.egg-info/PKG-INFO
  printf '[torch_dynamo_backends]\ntsmem = _tsmem_dynamo:backend\n' >python/tsmem.egg-info/entry_points.txt
  echo "set-up: installing Python packages into $venv"
  if [ -n "$site" ]; then # that torch, whatever its version is, and the torchvision that goes with it
    # As pip knows it: torch's own __version__ may have a suffix such as +cu130 that its package does not.
    version=$($venv/bin/python -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null) ||
      die "pip does not know the torch in '$site' as an installed package."
    pins "torch==$version" torchvision >$requirements
  else
    pins "torch==$torch" "torchvision==$vision" >$requirements
  fi
  $venv/bin/python -m pip install --quiet --disable-pip-version-check -r $requirements ||
    die "pip could not install $requirements into $venv."
  echo "$state" >$stamp
fi

# nvcc, where there are a device and a torch for it, and none is installed.
if [ "${1:-}" != other ]; then
  mapfile -t toolkit < <($venv/bin/python python/build_cuda.py)
  if [ ${#toolkit[@]} -gt 0 ]; then
    echo "set-up: installing ${toolkit[*]} into $venv"
    $venv/bin/python -m pip install --quiet --disable-pip-version-check "${toolkit[@]}" || echo "set-up: nvcc could not be installed; the kernels for CUDA are left out"
  fi
fi
