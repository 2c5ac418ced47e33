package main

// int train(const char* file, const char* trained);
import "C"

import "os"

func main() {
	os.Exit(int(C.train(C.CString(os.Args[1]), C.CString(os.Args[2]))))
}
