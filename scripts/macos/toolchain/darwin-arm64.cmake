# CMake toolchain: a Python module for macOS arm64, built on Linux.
# MACOS_LINK_STUBS: directory of the .tbd files. MACOS_EXT_SUFFIX: the module's, on a Mac.
set(CMAKE_SYSTEM_NAME Darwin)
set(CMAKE_SYSTEM_PROCESSOR arm64)
set(CMAKE_OSX_SYSROOT "")

set(CMAKE_CXX_COMPILER "${CMAKE_CURRENT_LIST_DIR}/darwin_cxx.py")
# CMake's check would link a program, and only modules can be linked.
set(CMAKE_CXX_COMPILER_WORKS TRUE)
set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)
set(CMAKE_MODULE_LINKER_FLAGS_INIT
    "-L${MACOS_LINK_STUBS} -lc++ -lobjc -lSystem -Wl,-dead_strip_dylibs")

set(CMAKE_AR llvm-ar-19)
set(CMAKE_RANLIB llvm-ranlib-19)
set(CMAKE_INSTALL_NAME_TOOL llvm-install-name-tool-19)
set(CMAKE_OTOOL llvm-otool-19)

# nanobind would name the module after the Python that runs CMake; SKBUILD_SOABI goes before that
# one's SOABI, and having fewer than three parts, as on a Mac, leaves NB_SUFFIX alone.
set(SKBUILD_SOABI darwin)
set(NB_SUFFIX "${MACOS_EXT_SUFFIX}")
