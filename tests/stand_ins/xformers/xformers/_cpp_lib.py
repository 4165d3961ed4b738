_cpp_library_load_exception = None
