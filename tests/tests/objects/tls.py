"""Speak TLS for a server without: PORT CERTIFICATE KEY LOG. Prints its own port; notes the first byte of each connection."""

import socket
import ssl
import sys
import threading

port, certificate, key, log = sys.argv[1:]
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(certificate, key)


def pass_on(source, sink):
    try:
        while data := source.recv(1 << 16):
            sink.sendall(data)
    except OSError:
        pass
    for end in (source, sink):
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


def serve(client):
    with open(log, "a") as to:
        to.write(client.recv(1, socket.MSG_PEEK).hex() + "\n")
    try:
        client = context.wrap_socket(client, server_side=True)
    except OSError:
        return
    server = socket.create_connection(("127.0.0.1", int(port)))
    threading.Thread(target=pass_on, args=(client, server), daemon=True).start()
    pass_on(server, client)


with socket.create_server(("127.0.0.1", 0)) as listener:
    print(listener.getsockname()[1], flush=True)
    while True:
        threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
