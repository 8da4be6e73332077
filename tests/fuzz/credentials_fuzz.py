"""config.json, the settings of TLS."""

from fuzzing import instrumented, run

with instrumented():
    from mscomm.cluster.credentials import Config, parse_config


def fuzz(data: bytes) -> None:
    try:
        config = parse_config(data, "/etc/config.json")
    except ValueError as error:
        str(error).encode("utf-8", "backslashreplace")  # a user sees this text
        return
    assert all(isinstance(text, str) for text in config[:-1]) and config.ca_cert_path.startswith("/")
    assert 7 <= config.cert_expire_warning_time_in_day <= 180


def seeds():
    yield b'{"ca_cert_path": "ca.crt", "server_cert_path": "a.p12", "client_cert_path": "/b.p12", "crl_path": "",'
    yield (
        b'{"ca_cert_path": "ca.crt", "server_cert_path": "a.p12", "client_cert_path": "/b.p12", "crl_path": "",'
        b' "cipher_list": "ECDHE-R SA-AES128-GCM-SHA256:X", "cert_expire_warning_time_in_day": 90}'
    )
    yield b'{"ca_cert_path": "\\ud800", "recovery": {}, "cert_expire_warning_time_in_day": 1e2}'
    assert Config("ca.crt").crl_path == ""


if __name__ == "__main__":
    run(fuzz, seeds())
