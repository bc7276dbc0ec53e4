"""Accepts connections for uvicorn, and waits while this process has no free descriptor.

The accept loop of asyncio does not wait: it retries a thousand times a second and logs each try.
"""

import asyncio
import errno
import logging
import socket

import uvicorn

RETRY_SECONDS = 0.5
BACKLOG = 2048
_OUT_OF_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}

log = logging.getLogger(__name__)


async def serve(server: uvicorn.Server, listener: socket.socket) -> None:
    """Serve the connections of a bound socket until `server.should_exit`. Close the socket."""
    accepting = asyncio.create_task(_accept_connections(server, listener))
    try:
        await server.serve(sockets=[])
    finally:
        accepting.cancel()
        await asyncio.gather(accepting, return_exceptions=True)
        listener.close()


async def _accept_connections(server: uvicorn.Server, listener: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    while not server.started:
        await asyncio.sleep(0.01)

    def create_protocol() -> asyncio.Protocol:
        protocol: asyncio.Protocol = server.config.http_protocol_class(  # type: ignore[call-arg]
            config=server.config,
            server_state=server.server_state,
            app_state=server.lifespan.state,
        )
        return protocol

    listener.setblocking(False)
    listener.listen(BACKLOG)
    while True:
        try:
            connection, _ = await loop.sock_accept(listener)
        except ConnectionError:
            continue  # the caller has disconnected
        except OSError as error:
            if error.errno not in _OUT_OF_RESOURCES:
                raise
            log.warning("calls wait: %s", error.strerror)
            await asyncio.sleep(RETRY_SECONDS)
            continue
        try:
            await loop.connect_accepted_socket(create_protocol, connection)
        except OSError as error:
            connection.close()
            log.warning("a call was dropped: %s", error.strerror)
