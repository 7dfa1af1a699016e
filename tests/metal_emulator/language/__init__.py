"""Metal Shading Language as text: from preprocessed source to C++ that clang compiles."""
