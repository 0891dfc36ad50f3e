# The kernels at each level of processor features, for the module and for tests/native.
#
# One object library a level: the same sources with other flags, in a namespace of their own. A level whose flags the
# compiler does not know is left out, and is never chosen.
include(CheckCXXCompilerFlag)

set(CPU_LEVELS "all" CACHE STRING "levels to build beside scalar, which always is; those of other processors are passed over")
set(CPU_AMX "" CACHE STRING "for tests, of avx512_amx: `emulated` tiles; or `trapped`, as if every processor had them")
set(CPU_SANITIZE "" CACHE STRING "sanitizers to build with, e.g. address,undefined")

set(level_scalar_flags "")
set(level_avx2_flags -mavx2 -mfma -mf16c)
set(level_avx512_flags -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx2 -mfma -mf16c)
set(level_avx512_vnni_flags ${level_avx512_flags} -mavx512vnni)
set(level_avx512_bf16_flags ${level_avx512_vnni_flags} -mavx512bf16)
# avx512_amx is some kernels (levels/amx) on top of another level
set(level_avx512_amx_base avx512_bf16)
set(level_avx512_amx_flags ${level_avx512_bf16_flags} -mamx-tile -mamx-int8 -mamx-bf16)
if(CPU_AMX STREQUAL "emulated")
  set(level_avx512_amx_base scalar)
  set(level_avx512_amx_flags -DENGINE_CPU_AMX_EMULATED)
endif()
# NEON is there on every 64-bit ARM, and so in `scalar`: a definition says who uses it. neon_bf16 asks for no more of the
# architecture than what it names: some processors have both extensions without the rest of armv8.6-a.
set(level_neon_flags -DENGINE_CPU_NEON)
set(level_neon_bf16_flags -DENGINE_CPU_NEON -march=armv8.2-a+bf16+i8mm)

set(known_levels "")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|amd64|AMD64")
  set(known_levels avx2 avx512 avx512_vnni avx512_bf16 avx512_amx)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64|ARM64")
  set(known_levels neon neon_bf16)
endif()
set(wanted_levels ${CPU_LEVELS})
if(CPU_LEVELS STREQUAL "all")
  set(wanted_levels ${known_levels})
endif()
set(levels scalar)
foreach(level ${wanted_levels})
  if(level IN_LIST known_levels)
    string(REPLACE ";" " " joined "${level_${level}_flags}")
    set(CMAKE_REQUIRED_FLAGS "${joined}")
    check_cxx_compiler_flag("" compiler_knows_${level})
    unset(CMAKE_REQUIRED_FLAGS)
    if(compiler_knows_${level})
      list(APPEND levels ${level_${level}_base} ${level})
    endif()
  endif()
endforeach()
list(REMOVE_DUPLICATES levels)

set(level_speed -O3)
if(CPU_SANITIZE)
  set(level_speed -O1) # -O3 takes minutes then
endif()
set(native_folder "${CMAKE_CURRENT_LIST_DIR}")
file(GLOB level_sources CONFIGURE_DEPENDS "${native_folder}/levels/*.cpp")
set(amx_sources "${native_folder}/levels/amx/packed.cpp")

# Makes `target` of the kernels of all levels, too.
function(add_levels target)
  # integer kernels give the same bits at all levels: no compiler makes one rounding of two there
  set_source_files_properties("${native_folder}/levels/quantized.cpp" ${amx_sources}
                              PROPERTIES COMPILE_OPTIONS -ffp-contract=off)
  foreach(level ${levels})
    set(sources ${level_sources})
    if(level STREQUAL "avx512_amx")
      set(sources ${amx_sources})
    endif()
    add_library(level_${level} OBJECT ${sources})
    target_include_directories(level_${level} PRIVATE "${native_folder}")
    target_compile_definitions(level_${level} PRIVATE ENGINE_CPU_LEVEL=${level} ENGINE_CPU_BASE=${level_${level}_base})
    target_compile_options(
      level_${level} PRIVATE ${level_speed} -fPIC -fvisibility=hidden -Wall -Wextra -fno-math-errno -fno-trapping-math
                             ${level_${level}_flags})
    if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
      # gcc 12 warns of its own header of intrinsics
      target_compile_options(level_${level} PRIVATE -Wno-uninitialized -Wno-maybe-uninitialized)
    endif()
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:level_${level}>)
    string(TOUPPER ${level} upper)
    target_compile_definitions(${target} PRIVATE ENGINE_CPU_HAS_${upper})
    if(CPU_SANITIZE)
      target_compile_options(level_${level} PRIVATE -fsanitize=${CPU_SANITIZE} -fno-omit-frame-pointer -g)
    endif()
  endforeach()
  if(CPU_AMX STREQUAL "emulated")
    target_compile_definitions(${target} PRIVATE ENGINE_CPU_AMX_FOR_TESTS=1)
  elseif(CPU_AMX STREQUAL "trapped")
    target_compile_definitions(${target} PRIVATE ENGINE_CPU_AMX_FOR_TESTS=0)
  endif()
  if(CPU_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${CPU_SANITIZE} -fno-omit-frame-pointer -g)
    target_link_options(${target} PRIVATE -fsanitize=${CPU_SANITIZE})
  endif()
endfunction()
