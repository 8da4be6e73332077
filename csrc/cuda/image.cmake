# Compiles the kernels in pack.cu for the devices that nvcc supports, and embeds them into the core through image.cc
# (csrc/device/image.cc.in). CMake's own CUDA language is not used, because it would look for the CUDA runtime, which mscomm does
# not need, and because the build would fail without nvcc.
#
# The image holds machine code for the oldest architecture of each generation. All later devices of that generation can run this
# code. The image also holds PTX for the oldest and the newest architecture. For a device of a generation without machine code, a
# driver that is at least as new as nvcc compiles the PTX. A driver that is older than nvcc can use only the machine code, and
# not even that if nvcc is too new for the driver. So build wheels with the oldest nvcc that supports the devices.
set(MSCOMM_CUDA_KERNELS AUTO CACHE STRING "Build the CUDA kernels: ON, OFF, or AUTO: ON if there is an nvcc of CUDA 12 or later")
set_property(CACHE MSCOMM_CUDA_KERNELS PROPERTY STRINGS AUTO ON OFF)

set(MSCOMM_IMAGE_INCBIN "")
set(MSCOMM_IMAGE_ARCHITECTURES "")
set(image ${CMAKE_CURRENT_BINARY_DIR}/mscomm_kernels.fatbin)
set(kernel_sources csrc/cuda/pack.cu csrc/cuda/batch.h csrc/base/numbers.h)
list(TRANSFORM kernel_sources PREPEND ${CMAKE_CURRENT_SOURCE_DIR}/)
# Fused multiply-add is off, so that the results are bitwise equal to those of separate operations. The image is not compressed,
# so that old drivers can read it.
set(nvcc_flags -std=c++20 -O3 --expt-relaxed-constexpr --fmad=false --no-compress -I${CMAKE_CURRENT_SOURCE_DIR}/csrc)

# Sets `architectures` to 75;80;86;..., or `why_not` to the reason why there are none.
function(ask_nvcc)
  find_program(MSCOMM_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin)
  if(NOT MSCOMM_NVCC)
    set(why_not "no nvcc in PATH, CUDA_HOME or /usr/local/cuda" PARENT_SCOPE)
    return()
  endif()
  list(GET kernel_sources 0 source)
  execute_process(COMMAND ${MSCOMM_NVCC} ${nvcc_flags} -ptx -o ${CMAKE_CURRENT_BINARY_DIR}/trial.ptx ${source}
                  RESULT_VARIABLE failed ERROR_VARIABLE errors OUTPUT_VARIABLE errors)
  if(failed)
    set(why_not "${MSCOMM_NVCC} does not compile them: ${errors}" PARENT_SCOPE)
    return()
  endif()
  execute_process(COMMAND ${MSCOMM_NVCC} --list-gpu-arch OUTPUT_VARIABLE known)
  string(REGEX MATCHALL "[0-9]+" known "${known}")
  list(FILTER known EXCLUDE REGEX "^([0-6].|7[0-4])$") # drops architectures before 7.5, which the newest nvcc does not support
  list(SORT known COMPARE NATURAL)
  set(architectures ${known} PARENT_SCOPE)
endfunction()

if(NOT MSCOMM_CUDA_KERNELS STREQUAL "OFF")
  ask_nvcc()
  if(architectures)
    list(GET architectures 0 oldest)
    list(GET architectures -1 newest)
    set(generations "")
    foreach(architecture ${architectures})
      math(EXPR generation "${architecture} / 10")
      if(NOT generation IN_LIST generations)
        list(APPEND generations ${generation})
        list(APPEND codes sm_${architecture})
        list(APPEND targets -gencode arch=compute_${architecture},code=sm_${architecture})
      endif()
    endforeach()
    foreach(architecture ${oldest} ${newest})
      list(APPEND codes compute_${architecture})
      list(APPEND targets -gencode arch=compute_${architecture},code=compute_${architecture})
    endforeach()
    list(GET kernel_sources 0 source)
    add_custom_command(OUTPUT ${image} COMMAND ${MSCOMM_NVCC} ${nvcc_flags} ${targets} -fatbin -o ${image} ${source}
                       DEPENDS ${kernel_sources} COMMENT "CUDA kernels" VERBATIM)
    set(MSCOMM_IMAGE_INCBIN ".incbin \"${image}\"")
    string(REPLACE ";" " " MSCOMM_IMAGE_ARCHITECTURES "${codes}")
    message(STATUS "CUDA kernels: ${MSCOMM_IMAGE_ARCHITECTURES}, by ${MSCOMM_NVCC}")
  elseif(MSCOMM_CUDA_KERNELS STREQUAL "AUTO")
    message(STATUS "No CUDA kernels: ${why_not}")
  else()
    message(FATAL_ERROR "No CUDA kernels: ${why_not}")
  endif()
endif()

configure_file(csrc/device/image.cc.in image.cc @ONLY)
target_sources(mscomm_core PRIVATE ${CMAKE_CURRENT_BINARY_DIR}/image.cc)
if(MSCOMM_IMAGE_INCBIN)
  set_source_files_properties(${CMAKE_CURRENT_BINARY_DIR}/image.cc PROPERTIES OBJECT_DEPENDS ${image})
endif()
