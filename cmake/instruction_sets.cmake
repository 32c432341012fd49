# Kernels of an instruction set live in files named *_<isa>.cpp, compiled for it and only called after a run-time check.
get_filename_component(OSCAR_SOURCE_DIR ${CMAKE_CURRENT_LIST_DIR}/.. ABSOLUTE)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  file(GLOB avx2_sources CONFIGURE_DEPENDS ${OSCAR_SOURCE_DIR}/src/*/*_avx2.cpp)
  set_source_files_properties(${avx2_sources} PROPERTIES COMPILE_OPTIONS "-mavx2;-mfma;-mf16c")
  file(GLOB avxvnni_sources CONFIGURE_DEPENDS ${OSCAR_SOURCE_DIR}/src/*/*_avxvnni.cpp)
  set_source_files_properties(${avxvnni_sources} PROPERTIES COMPILE_OPTIONS "-mavx2;-mfma;-mf16c;-mavxvnni")
  file(GLOB avx512_sources CONFIGURE_DEPENDS ${OSCAR_SOURCE_DIR}/src/*/*_avx512.cpp)
  set_source_files_properties(${avx512_sources} PROPERTIES COMPILE_OPTIONS
    "-mavx2;-mfma;-mf16c;-mavx512f;-mavx512bw;-mavx512dq;-mavx512vl;-mavx512vnni")
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64")  # *_neon.cpp: what every such processor has
  # Codecs must code a row to the same bytes as on x86-64: a multiply and an add are fused where the source says so only.
  add_compile_options(-ffp-contract=off)
  file(GLOB dotprod_sources CONFIGURE_DEPENDS ${OSCAR_SOURCE_DIR}/src/*/*_neon_dotprod.cpp)
  set_source_files_properties(${dotprod_sources} PROPERTIES COMPILE_OPTIONS "-march=armv8.2-a+dotprod")
  file(GLOB i8mm_sources CONFIGURE_DEPENDS ${OSCAR_SOURCE_DIR}/src/*/*_neon_i8mm.cpp)
  set_source_files_properties(${i8mm_sources} PROPERTIES COMPILE_OPTIONS "-march=armv8.2-a+dotprod+i8mm")
endif()
