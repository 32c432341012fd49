# Ring 2 for NVIDIA GPUs. Compiling needs nvcc and no GPU; OSCAR_CUDA is ON where nvcc is found. OSCAR_NVCC names another one.
set(OSCAR_NVCC "" CACHE FILEPATH "nvcc, where it is not found by itself")
find_program(OSCAR_NVCC_FOUND nvcc HINTS ENV CUDA_HOME PATHS /usr/local/cuda/bin NO_CACHE)
if(OSCAR_NVCC)
  set(OSCAR_NVCC_FOUND ${OSCAR_NVCC})
endif()
if(OSCAR_NVCC_FOUND)
  set(cuda_default ON)
else()
  set(cuda_default OFF)
endif()
option(OSCAR_CUDA "Build the CUDA kernels" ${cuda_default})
if(NOT OSCAR_CUDA)
  message(STATUS "CUDA kernels are not built (OSCAR_CUDA=OFF; nvcc: ${OSCAR_NVCC_FOUND})")
  return()
endif()

if(NOT CMAKE_CUDA_COMPILER AND OSCAR_NVCC_FOUND)
  set(CMAKE_CUDA_COMPILER ${OSCAR_NVCC_FOUND})
endif()
# sm_90a: H100, H200; 80: A100; 89: L4, L40, RTX 40; PTX of 90 for what comes later.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 80-real 89-real 90a-real 90-virtual)
endif()
if(CCACHE_PROGRAM AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CMAKE_CXX_COMPILER_LAUNCHER})
endif()
enable_language(CUDA)
# CMake 3.25 does not know how this nvcc is told about C++20.
set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
set(CMAKE_CUDA_STANDARD 20)

file(GLOB cuda_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/cuda/*.cu ${PROJECT_SOURCE_DIR}/src/cuda/*.cpp)
add_library(oscar_cuda STATIC ${cuda_sources})
add_library(oscar::cuda ALIAS oscar_cuda)
target_include_directories(oscar_cuda PRIVATE ${PROJECT_SOURCE_DIR}/src)
set_target_properties(oscar_cuda PROPERTIES EXPORT_NAME cuda)
# An installed package looks for its own CUDA headers (cmake/oscarConfig.cmake.in).
target_include_directories(oscar_cuda SYSTEM PUBLIC "$<BUILD_INTERFACE:${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES}>")
target_link_libraries(oscar_cuda PUBLIC oscar::oscar)
if(CMAKE_CUDA_ARCHITECTURES MATCHES "90a")
  target_compile_definitions(oscar_cuda PRIVATE OSCAR_CUDA_SM90A)
endif()
# The page format is constexpr functions that host and device share.
target_compile_options(oscar_cuda PRIVATE
  $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr -lineinfo -Xcompiler=-Wall,-Wextra>
  $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${OSCAR_WERROR}>>:-Werror=all-warnings>)
