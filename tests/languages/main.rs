use std::ffi::{c_char, c_int, CString};

extern "C" {
    fn train(file: *const c_char, trained: *const c_char) -> c_int;
}

fn main() {
    let files: Vec<CString> = std::env::args()
        .skip(1)
        .map(|a| CString::new(a).unwrap())
        .collect();
    std::process::exit(unsafe { train(files[0].as_ptr(), files[1].as_ptr()) });
}
