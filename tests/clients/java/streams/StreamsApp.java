import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.KeyValue;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.errors.StreamsUncaughtExceptionHandler.StreamThreadExceptionResponse;
import org.apache.kafka.streams.kstream.Grouped;
import org.apache.kafka.streams.kstream.KGroupedStream;
import org.apache.kafka.streams.kstream.Materialized;
import org.apache.kafka.streams.kstream.Produced;
import org.apache.kafka.streams.kstream.TimeWindows;
import org.apache.kafka.streams.processor.StateRestoreListener;

/**
 * One instance of an application of Kafka Streams: how often each word of the values of `lines` came, all in all and by
 * windows. It prints what befalls it, a JSON object a line, and closes when a line comes in; it dies with its stdin.
 *
 * Argument: its configs, as JSON. With `window_ms` also the counts of windows.
 */
public final class StreamsApp implements StateRestoreListener {
    private static final ObjectMapper JSON = new ObjectMapper();

    public static void main(String[] args) throws Exception {
        Properties configs = new Properties();
        JsonNode asked = JSON.readTree(args[0]);
        asked.properties().forEach(config -> configs.put(config.getKey(), config.getValue().asText()));
        configs.put("default.key.serde", Serdes.StringSerde.class.getName());
        configs.put("default.value.serde", Serdes.StringSerde.class.getName());
        StreamsBuilder builder = new StreamsBuilder();
        KGroupedStream<String, String> words = builder.<String, String>stream("lines")
            .flatMapValues(line -> List.of(line.split(" ")))
            .groupBy((key, word) -> word, Grouped.as("words"));
        words.count(Materialized.as("counts")).toStream()
            .mapValues(count -> count.toString()).to("counted", Produced.with(Serdes.String(), Serdes.String()));
        if (asked.has("window_ms")) {
            Duration size = Duration.ofMillis(asked.get("window_ms").asLong());
            words.windowedBy(TimeWindows.ofSizeAndGrace(size, Duration.ofDays(1)))
                .count(Materialized.as("windows")).toStream()
                .map((window, count) -> new KeyValue<>(
                    window.key() + "@" + window.window().start(), count.toString()))
                .to("windowed", Produced.with(Serdes.String(), Serdes.String()));
        }
        KafkaStreams streams = new KafkaStreams(builder.build(), configs);
        streams.setStateListener((now, before) -> say(Map.of("state", now.name())));
        streams.setGlobalStateRestoreListener(new StreamsApp());
        streams.setUncaughtExceptionHandler(raised -> {
            Throwable cause = raised;
            while (cause.getCause() != null) {
                cause = cause.getCause();
            }
            say(Map.of("failed", cause.toString()));
            return StreamThreadExceptionResponse.SHUTDOWN_CLIENT;
        });
        streams.start();
        if (new BufferedReader(new InputStreamReader(System.in)).readLine() != null) {
            say(Map.of("closed", streams.close(Duration.ofSeconds(40))));
        }
        Runtime.getRuntime().halt(0);
    }

    private static synchronized void say(Map<String, Object> what) {
        try {
            System.out.println(JSON.writeValueAsString(what));
            System.out.flush();
        } catch (java.io.IOException gone) {
            Runtime.getRuntime().halt(1);
        }
    }

    @Override
    public void onRestoreStart(TopicPartition partition, String store, long start, long end) {}

    @Override
    public void onBatchRestored(TopicPartition partition, String store, long end, long count) {}

    @Override
    public void onRestoreEnd(TopicPartition partition, String store, long count) {
        say(Map.of("restored", count, "store", store, "partition", partition.partition()));
    }
}
