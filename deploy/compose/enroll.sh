#!/bin/sh
# Makes the keys and certificates of the compose fleet, once: run by its service "enroll".
# Every party gets a volume of its own; the authority's stays with this service alone.
set -eu
umask 077

authority=/enroll/authority
tenant_key=/enroll/tenant.key
parties="node-a node-b client"

[ -e "$tenant_key" ] || kvpack keygen --tenant "${KVPACK_TENANT:-compose}" "$tenant_key"
for name in $parties; do
  [ -e "/enroll/$name/credentials/node-cert.pem" ] ||
    kvnode enroll --authority "$authority" --credentials "/enroll/$name/credentials" \
      --name "$name" --tenant-key "$tenant_key"
done

leaf() { echo "/enroll/$1/credentials/node-cert.pem"; }
# The nodes know each other and the client; the client knows the nodes. Pinning again changes nothing.
kvnode pin --credentials /enroll/node-a/credentials --node "$(leaf node-b)" --client "$(leaf client)"
kvnode pin --credentials /enroll/node-b/credentials --node "$(leaf node-a)" --client "$(leaf client)"
kvnode pin --credentials /enroll/client/credentials --node "$(leaf node-a)"
kvnode pin --credentials /enroll/client/credentials --node "$(leaf node-b)"

# One API key for both nodes, printed once, here: docker compose logs enroll
if [ ! -e /enroll/client/api-keys ]; then
  kvnode apikey add --file /enroll/client/api-keys --tenant "${KVPACK_TENANT:-compose}" --admin
fi
for name in node-a node-b; do
  cp /enroll/client/api-keys "/enroll/$name/api-keys.new"
  mv "/enroll/$name/api-keys.new" "/enroll/$name/api-keys"
done
