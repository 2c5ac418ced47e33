// An empty library under the name of libtorch_python.so, for op libraries that name it and use nothing of it.
// It needs no Python, which the real one does.
