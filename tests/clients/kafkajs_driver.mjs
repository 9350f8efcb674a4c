// kafkajs, driven by lines of JSON; the verbs are those of tests/kafka/foreign.py.
import { readFileSync } from 'node:fs'
import { createInterface } from 'node:readline'
import kafkajs from 'kafkajs'

const { Kafka, CompressionTypes, AssignerProtocol, ConfigResourceTypes, AclResourceTypes, ResourcePatternTypes,
  AclOperationTypes, AclPermissionTypes, logLevel } = kafkajs
const PATIENCE_MS = 40_000

let kafka, admin
const members = new Map()
const producers = new Map()

const until = async (condition) => {
  const end = Date.now() + PATIENCE_MS
  while (!condition()) {
    if (Date.now() > end) throw new Error('deadline passed')
    await new Promise((resolve) => setTimeout(resolve, 20))
  }
}
const text = (data) => (data === null || data === undefined ? null : data.toString())
const row = (partition, message) => [partition, Number(message.offset), text(message.key), text(message.value)]

// Answers give the first offset of each partition's batch; one sender is one batch a partition.
const send = async (producer, asked, more = {}) => {
  const messages = asked.records.map(([partition, key, value]) => ({ partition, key, value }))
  const answers = await producer.send({ topic: asked.topic, messages, acks: asked.idempotent === false ? 1 : -1, ...more })
  const next = new Map(answers.map((answer) => [answer.partition, Number(answer.baseOffset)]))
  return asked.records.map(([partition]) => {
    const offset = next.get(partition)
    next.set(partition, offset + 1)
    return offset
  })
}

const temporary = async (asked, groupId, more, enough) => {
  const consumer = kafka.consumer({ groupId, maxWaitTimeInMs: 100, heartbeatInterval: 300, ...more })
  try {
    await consumer.connect()
    await consumer.subscribe({ topics: [asked.topic], fromBeginning: true })
    await enough(consumer)
  } finally {
    await consumer.disconnect()
  }
}

const security = ({ mechanism, user, password, ca, certificate, key }) => {
  const found = {}
  if (ca) found.ssl = { ca: [readFileSync(ca)] }
  if (certificate) Object.assign(found.ssl, { cert: readFileSync(certificate), key: readFileSync(key) })
  if (mechanism === 'OAUTHBEARER') {
    found.sasl = { mechanism: 'oauthbearer', oauthBearerProvider: async () => ({ value: password }) }
  } else if (mechanism) {
    found.sasl = { mechanism: mechanism.toLowerCase(), username: user, password }
  }
  return found
}

const readable = (asked) => ({
  resourceType: AclResourceTypes.TOPIC, resourceName: asked.topic, resourcePatternType: ResourcePatternTypes.LITERAL,
  principal: asked.principal, host: '*', operation: AclOperationTypes.READ, permissionType: AclPermissionTypes.ALLOW,
})

const verbs = {
  async connect(asked) {
    if (admin) await admin.disconnect()
    kafka = new Kafka({
      clientId: 'kafkajs', brokers: asked.bootstrap.split(','), logLevel: logLevel.NOTHING,
      retry: { initialRetryTime: 50, retries: 12, maxRetryTime: 2_000 },
      ...security(asked),
    })
    admin = kafka.admin()
    await admin.connect()
    return true
  },
  async produce(asked) {
    const producer = kafka.producer({ idempotent: asked.idempotent, metadataMaxAge: 1_000 })
    await producer.connect()
    try {
      const compression = asked.compression === 'gzip' ? CompressionTypes.GZIP : CompressionTypes.None
      return await send(producer, asked, { compression })
    } finally {
      await producer.disconnect()
    }
  },
  // kafkajs consumes in groups alone.
  async read(asked) {
    const found = []
    const more = { readUncommitted: asked.isolation !== 'read_committed' }
    await temporary(asked, `read-${asked.topic}-${Math.random()}`, more, async (consumer) => {
      await consumer.run({
        autoCommit: false,
        eachMessage: async ({ partition, message }) => { found.push(row(partition, message)) },
      })
      await until(() => found.length >= asked.count)
    })
    return found
  },
  async join(asked) {
    const seen = { assigned: [], assignments: 0, revoked: 0, got: [], failed: '' }
    const consumer = kafka.consumer({
      groupId: asked.group, sessionTimeout: 10_000, heartbeatInterval: 300, maxWaitTimeInMs: 100, metadataMaxAge: 1_000,
    })
    consumer.on(consumer.events.GROUP_JOIN, ({ payload }) => {
      seen.revoked += seen.assigned.length
      seen.assigned = [...(payload.memberAssignment[asked.topic] ?? [])].sort((a, b) => a - b)
      seen.assignments += 1
    })
    consumer.on(consumer.events.CRASH, ({ payload }) => { seen.failed = String(payload.error) })
    await consumer.connect()
    await consumer.subscribe({ topics: [asked.topic], fromBeginning: true })
    await consumer.run({
      autoCommitThreshold: 1,
      eachMessage: async ({ partition, message }) => { seen.got.push(row(partition, message)) },
    })
    members.set(asked.member, { consumer, seen })
    return true
  },
  async state(asked) { return members.get(asked.member).seen },
  async leave(asked) {
    const { consumer, seen } = members.get(asked.member)
    members.delete(asked.member)
    await consumer.disconnect()
    return seen
  },
  async begin(asked) {
    if (!producers.has(asked.producer)) {
      const producer = kafka.producer({
        idempotent: true, maxInFlightRequests: 1, transactionalId: asked.id, transactionTimeout: asked.timeout_ms,
      })
      await producer.connect()
      producers.set(asked.producer, { producer })
    }
    const one = producers.get(asked.producer)
    one.transaction = await one.producer.transaction()
    return true
  },
  async send(asked) { return send(producers.get(asked.producer).transaction, asked) },
  async end(asked) {
    const { transaction } = producers.get(asked.producer)
    await (asked.commit ? transaction.commit() : transaction.abort())
    return true
  },
  async close(asked) {
    await producers.get(asked.producer).producer.disconnect()
    producers.delete(asked.producer)
    return true
  },
  // Reads from one topic in a group and writes to another, offsets and records in one transaction a batch.
  async transfer(asked) {
    let left = asked.count
    const producer = kafka.producer({ idempotent: true, maxInFlightRequests: 1, transactionalId: asked.id })
    await producer.connect()
    try {
      await temporary(asked, asked.group, { readUncommitted: false }, async (consumer) => {
        await consumer.run({
          autoCommit: false,
          eachBatch: async ({ batch, resolveOffset }) => {
            const transaction = await producer.transaction()
            const { topic, partition } = batch
            const messages = batch.messages.map(({ key, value }) => ({ partition, key, value }))
            await transaction.send({ topic: asked.to, messages })
            const offset = String(Number(batch.lastOffset()) + 1)
            const topics = [{ topic, partitions: [{ partition, offset }] }]
            await transaction.sendOffsets({ consumerGroupId: asked.group, topics })
            await transaction.commit()
            resolveOffset(batch.lastOffset())
            left -= messages.length
          },
        })
        await until(() => left <= 0)
      })
    } finally {
      await producer.disconnect()
    }
    return left
  },
  async create(asked) {
    const configEntries = Object.entries(asked.configs).map(([name, value]) => ({ name, value }))
    return admin.createTopics({
      topics: [{ topic: asked.topic, numPartitions: asked.partitions, configEntries }], waitForLeaders: false,
    }).then((made) => { if (!made) throw Object.assign(new Error('the topic is there'), { code: 36 }); return true })
  },
  async delete(asked) { await admin.deleteTopics({ topics: [asked.topic] }); return true },
  async topics() { return admin.listTopics() },
  async describe(asked) {
    const { topics } = await admin.fetchTopicMetadata({ topics: [asked.topic] })
    return topics[0].partitions.length
  },
  async grow(asked) {
    return admin.createPartitions({ topicPartitions: [{ topic: asked.topic, count: asked.partitions }] })
  },
  async truncate(asked) {
    const partitions = [{ partition: asked.partition, offset: String(asked.offset) }]
    await admin.deleteTopicRecords({ topic: asked.topic, partitions })
    return verbs.offset({ ...asked, at: -2 })
  },
  async offset(asked) {
    const found = asked.at >= 0
      ? await admin.fetchTopicOffsetsByTimestamp(asked.topic, asked.at)
      : await admin.fetchTopicOffsets(asked.topic)
    const one = found.find(({ partition }) => partition === asked.partition)
    return Number(asked.at === -2 ? one.low : asked.at === -1 ? one.high : one.offset)
  },
  async configs(asked) {
    const { resources } = await admin.describeConfigs({
      resources: [{ type: ConfigResourceTypes.TOPIC, name: asked.topic }], includeSynonyms: false,
    })
    return Object.fromEntries(resources[0].configEntries.map(({ configName, configValue }) => [configName, configValue]))
  },
  // The old AlterConfigs replaces everything: what is not named goes back to its default.
  async alter(asked) {
    const configEntries = Object.entries(asked.configs)
      .filter(([, value]) => value !== null).map(([name, value]) => ({ name, value }))
    await admin.alterConfigs({
      validateOnly: false, resources: [{ type: ConfigResourceTypes.TOPIC, name: asked.topic, configEntries }],
    })
    return true
  },
  async groups() { return (await admin.listGroups()).groups.map(({ groupId }) => groupId) },
  async group(asked) {
    const [one] = (await admin.describeGroups([asked.group])).groups
    return { state: one.state, members: one.members.length }
  },
  async delete_group(asked) { await admin.deleteGroups([asked.group]); return true },
  async committed(asked) {
    const [one] = await admin.fetchOffsets({ groupId: asked.group, topics: [asked.topic] })
    return Object.fromEntries(one.partitions.map(({ partition, offset }) => [partition, Number(offset)]))
  },
  async acl_add(asked) { await admin.createAcls({ acl: [readable(asked)] }); return true },
  async acls() {
    const { resources } = await admin.describeAcls({
      resourceType: AclResourceTypes.ANY, resourcePatternType: ResourcePatternTypes.ANY,
      operation: AclOperationTypes.ANY, permissionType: AclPermissionTypes.ANY,
    })
    return resources.reduce((sum, { acls }) => sum + acls.length, 0)
  },
  async acl_delete(asked) {
    const { filterResponses } = await admin.deleteAcls({ filters: [readable(asked)] })
    return filterResponses.reduce((sum, { matchingAcls }) => sum + matchingAcls.length, 0)
  },
}

const code = (error) => {
  for (let at = error; at; at = at.originalError ?? at.cause ?? at.errors?.[0]) {
    if (Number.isInteger(at.code)) return at.code
  }
  return -1
}

for await (const line of createInterface({ input: process.stdin })) {
  const asked = JSON.parse(line)
  let answer
  try {
    answer = { ok: (await verbs[asked.do](asked)) ?? null }
  } catch (error) {
    answer = { error: code(error), message: String(error) }
  }
  process.stdout.write(`${JSON.stringify(answer)}\n`)
}
process.exit(0)
