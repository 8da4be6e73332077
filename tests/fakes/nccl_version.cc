// Says which version of NCCL nccl.cc is. build.py compiles this file once for each version.
extern const int fake_nccl_version;
const int fake_nccl_version = FAKE_NCCL_VERSION;
