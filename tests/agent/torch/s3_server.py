"""An S3 server on loopback, in a thread, that speaks the real protocol over HTTP."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import boto3
import s3fs
from moto.server import ThreadedMotoServer

BUCKET = "trainings"


@contextmanager
def s3_server() -> Iterator[str]:
    """The URL of an empty bucket there; until its end the environment's AWS settings lead to it."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    settings = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "trainer",
        "AWS_SECRET_ACCESS_KEY": "sesame",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        boto3.client("s3").create_bucket(Bucket=BUCKET)
        yield f"s3://{BUCKET}"
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        s3fs.S3FileSystem.clear_instance_cache()
        server.stop()
