#!/bin/sh
# Builds llama.cpp's programs from the source package of llama-cpp-python, which brings it along, with all that this
# machine's CPU can do. Needs a C++ compiler, CMake and Ninja; some ten minutes on two cores.
#
#   bench/build_llama_cpp.sh build/llama.cpp              # the programs are then in build/llama.cpp/bin
#   bench/build_llama_cpp.sh build/llama.cpp configure    # up to the point where compiling would begin
#
# PYTHON               whose pip fetches it (default: python3)
# LLAMA_CPP_PYTHON     the version of the package
set -eu

if [ $# -lt 1 ] || [ "${2:-configure}" != configure ]; then
    echo "usage: $0 DIRECTORY [configure]" >&2
    exit 2
fi
python=${PYTHON:-python3}
version=${LLAMA_CPP_PYTHON:-0.3.36}
mkdir -p "$1"
directory=$(CDPATH='' cd -- "$1" && pwd)

archive=$directory/llama_cpp_python-$version.tar.gz
if [ ! -e "$archive" ]; then
    "$python" -m pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python \
        --dest "$directory" "llama-cpp-python==$version"
fi
sources=$directory/llama_cpp_python-$version/vendor/llama.cpp
if [ ! -e "$sources/CMakeLists.txt" ]; then
    tar -xzf "$archive" -C "$directory"
fi

project=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)/cpu_peers/llama_turns
cmake -G Ninja -S "$project" -B "$directory/build" -DLLAMA_CPP="$sources" \
    -DLLAMA_BUILD_COMMON=ON -DLLAMA_BUILD_TOOLS=ON -DLLAMA_BUILD_SERVER=ON
if [ $# -gt 1 ]; then
    exit
fi
cmake --build "$directory/build" --target llama-turns llama-server llama-quantize llama-perplexity llama-batched-bench
ln -sfn build/bin "$directory/bin"
